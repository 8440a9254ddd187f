"""Tiles of the fused products per generation."""

from __future__ import annotations

from dataclasses import dataclass

from ..conv3d.schedules import of_generation


@dataclass(frozen=True)
class Schedule:
    """Rows and columns of one program, its depth of one step; warps; stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


#: (projected, gated_product, added) per generation.
SCHEDULES: dict[int, tuple[Schedule, Schedule, Schedule]] = {
    80: (Schedule(64, 64, 64, 4, 2), Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 3)),
    90: (Schedule(128, 64, 64, 8, 1), Schedule(128, 128, 64, 8, 2), Schedule(128, 256, 64, 8, 4)),
    100: (Schedule(64, 64, 64, 4, 2), Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 3)),
    120: (Schedule(64, 64, 64, 4, 2), Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 3)),
}

#: Of the gated product that makes the next columns while those before go through SiLU: two buffers of 128 rows fill
#: the shared memory.
WIDE = Schedule(128, 128, 256, 8, 2)


def pick(sm: int) -> tuple[Schedule, Schedule, Schedule]:
    return of_generation(SCHEDULES, sm)
