"""Block sizes of the memory-bound passes: elements in flight per program, for whole channel rows."""

from __future__ import annotations

# Elements one program of `warps` warps holds: 16-byte accesses, two or more in flight per thread.
ELEMENTS = 4096
WARPS = 4
# Image rows summed by one program of the statistics pass (its blocks never depend on the launch).
STAT_ROWS = 1
STAT_ELEMENTS = 4096


def positions(channels: int) -> int:
    """Return the positions per program for `channels` (a power of two) channels."""
    return max(ELEMENTS // channels, 1)
