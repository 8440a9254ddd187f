"""Tiles of the neighbourhood kernel per generation."""

from __future__ import annotations

from dataclasses import dataclass

from ..conv3d.schedules import of_generation
from .windows import TERMS


@dataclass(frozen=True)
class Schedule:
    """Queries of one program (they fill a tile as far as its sides allow) and their frames; keys per step; warps;
    stages."""

    queries: int
    frames: int
    keys: int
    warps: int
    stages: int

    def tile(self, kernel: tuple[int, int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return rows and columns of a tile of queries, and of its keys' region: its columns are a power of two, its
        rows fill whole steps."""
        wide = max(16, 1 << (kernel[2] + 3).bit_length())
        columns = min(wide - kernel[2] + 1, WIDEST)
        rows = max(min(self.queries // (self.frames * columns), TERMS - columns), 1)
        step = self.keys // wide
        return (rows, columns), (-(-(rows + kernel[1] - 1) // step) * step, wide)


#: Most columns of queries in a tile, and the widest window that tiles are made for.
WIDEST, LONGEST = 10, 28
_TWO = Schedule(queries=64, frames=2, keys=64, warps=4, stages=3)
SCHEDULES: dict[int, Schedule] = {80: _TWO, 90: _TWO, 100: _TWO, 120: _TWO}


def pick(sm: int) -> Schedule:
    return of_generation(SCHEDULES, sm)
