"""The memory of one run: arena, rings, histories, parking, pinned memory, CUDA graphs, and torch's settings."""
