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


# Largest head -> schedule, or None where torch's memory-efficient kernel is faster. The accumulator is bm x dv in fp32;
# slices of the values beyond dv go to other programs, which repeat the scores: 128 queries per tile at half the values
# beat 64 at all of them (1.83 against 2.35 ms at 14,400 tokens of 512 on an H200). sm_90 is measured; the others fit
# their shared memory and do not spill.
SCHEDULES: dict[int, dict[int, Schedule | None]] = {
    90: {512: Schedule(128, 64, 256, 8, 1), 1024: None},
    100: {512: Schedule(64, 32, 256, 8, 2), 1024: None},
    120: {512: Schedule(32, 16, 512, 8, 1), 1024: None},
    80: {512: Schedule(32, 16, 512, 8, 1), 1024: None},
}
# Heads of 513 to 1024, where the kernel is asked for by name: right, and no faster than torch's.
LARGE = {
    90: Schedule(64, 16, 512, 8, 2), 100: Schedule(64, 16, 256, 8, 2), 120: Schedule(16, 16, 512, 8, 1),
    80: Schedule(16, 16, 512, 8, 1),
}  # fmt: skip


def pick(sm: int, head: int) -> Schedule | None:
    """The schedule `auto` runs, or None where it leaves the head to torch."""
    return SCHEDULES[generation(sm)][512 if head <= 512 else 1024]


def large(sm: int) -> Schedule:
    """A schedule for heads of 513 to 1024."""
    return LARGE[generation(sm)]
