"""Tiles of the attention kernel per generation and head size."""

from __future__ import annotations

from dataclasses import dataclass

from ..conv3d.schedules import generation


@dataclass(frozen=True)
class Schedule:
    """Queries and keys per tile; value columns one program keeps; warps; stages."""

    bm: int
    bn: int
    dv: int
    warps: int
    stages: int


# Head size rounded up to a power of two -> schedule. The accumulator is bm x dv in fp32 and the query tile stays in
# shared memory. sm_90 measured on an H200; the others fit 99 KiB and do not spill.
SCHEDULES: dict[int, dict[int, Schedule]] = {
    90: {512: Schedule(64, 32, 512, 8, 2), 1024: Schedule(64, 16, 512, 8, 2)},
    100: {512: Schedule(64, 32, 256, 8, 2), 1024: Schedule(64, 16, 256, 8, 2)},
    120: {512: Schedule(32, 16, 512, 8, 1), 1024: Schedule(16, 16, 512, 8, 1)},
    80: {512: Schedule(32, 16, 512, 8, 1), 1024: Schedule(16, 16, 512, 8, 1)},
}


def pick(sm: int, head: int) -> Schedule:
    return SCHEDULES[generation(sm)][512 if head <= 512 else 1024]
