"""The memory of one run: arena, rings, histories, parking, pinned memory, and torch's settings."""
