"""Tiles of the fused products per generation."""

from __future__ import annotations

from dataclasses import dataclass

from .....kernels.conv3d.schedules import of_generation


@dataclass(frozen=True)
class Schedule:
    """Rows and columns of one program, its depth of one step; warps; stages; the registers that a thread may take, so
    that programs share a processor (0: any number)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    registers: int = 0


#: (projected, gated_product, added) per generation.
SCHEDULES: dict[int, tuple[Schedule, Schedule, Schedule]] = {
    80: (Schedule(64, 64, 64, 4, 2), Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 3)),
    90: (Schedule(128, 64, 64, 8, 1), Schedule(128, 128, 64, 8, 2), Schedule(128, 256, 64, 8, 4)),
    100: (Schedule(64, 64, 64, 4, 2), Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 3)),
    120: (Schedule(64, 64, 64, 4, 2), Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 3)),
}

#: Of the kernels for wgmma. Three programs share a processor: one multiplies while the others go through what follows.
WIDE = Schedule(64, 64, 256, 4, 2, 168)


#: Columns of a gate's 8-bit results that have one scale: half the weight's rows of a program's step.
GROUP = 64
#: The same as SCHEDULES of 8-bit operands; the gated product's columns are 2 GROUP, and the depth of the last product
#: is GROUP, or that of the 16-bit product in it. Not measured: those of 16 bit, as far as they fit.
NARROW: dict[int, tuple[Schedule, Schedule, Schedule]] = {
    80: (Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 2), Schedule(128, 128, 64, 8, 2)),
    90: (Schedule(128, 64, 64, 8, 2), Schedule(128, 128, 64, 8, 2, 128), Schedule(128, 128, 64, 8, 3)),
    100: (Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 2), Schedule(128, 128, 64, 8, 2)),
    120: (Schedule(64, 64, 64, 4, 2), Schedule(128, 128, 64, 8, 2), Schedule(128, 128, 64, 8, 2)),
}


@dataclass(frozen=True)
class Fed:
    """Tiles of `feed.py`, which is written for them. rows: of each of two groups; columns: of the gate's results in a
    step; deep: columns of x in a buffer; slots: buffers; width: channels of x."""

    rows: int = 64
    columns: int = 64
    deep: int = 128
    slots: int = 5
    width: int = 256


FED = Fed()


def narrow(sm: int) -> tuple[Schedule, Schedule, Schedule]:
    """Return the tiles of 8-bit products."""
    return of_generation(NARROW, sm)


def pick(sm: int) -> tuple[Schedule, Schedule, Schedule]:
    return of_generation(SCHEDULES, sm)
