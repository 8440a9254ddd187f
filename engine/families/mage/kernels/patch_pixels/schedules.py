"""Tiles of patch_pixels per generation."""

from __future__ import annotations

from dataclasses import dataclass

from .....kernels.conv3d.schedules import of_generation


@dataclass(frozen=True)
class Schedule:
    """Positions of one program, channels of one step; warps; stages."""

    positions: int
    depth: int
    warps: int
    stages: int


SCHEDULES: dict[int, Schedule] = {
    80: Schedule(64, 64, 4, 2),
    90: Schedule(64, 64, 4, 4),
    100: Schedule(64, 64, 4, 3),
    120: Schedule(64, 64, 4, 3),
}


def pick(sm: int) -> Schedule:
    return of_generation(SCHEDULES, sm)
