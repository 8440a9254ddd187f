"""Tiles of the neighbourhood kernel per generation."""

from __future__ import annotations

from dataclasses import dataclass

from ..conv3d.schedules import of_generation


@dataclass(frozen=True)
class Schedule:
    """Frames, rows and columns of queries in one program; keys per step; warps; stages."""

    queries: tuple[int, int, int]
    keys: int
    warps: int
    stages: int


# One H200, 176x320 tokens, 4 heads of 64, windows of 11x11x11: two frames of 4x8 queries read 2.3 keys for each that
# they use and take 0.52 ms a frame; 4x4x8 with twice the warps 0.57, 1x8x8 0.72, 2x8x8 0.72. The regions of 4x8
# queries have 14x18 = 252 keys, which fill blocks of 64.
_TWO = Schedule(queries=(2, 4, 8), keys=64, warps=4, stages=3)
SCHEDULES: dict[int, Schedule] = {80: _TWO, 90: _TWO, 100: _TWO, 120: _TWO}


def pick(sm: int) -> Schedule:
    return of_generation(SCHEDULES, sm)
