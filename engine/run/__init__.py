"""A clip on its way through a network: its memory, its place in time, and what happens when either runs short."""
