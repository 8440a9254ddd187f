"""Which rows of frames each of several ranks makes of a Program's steps."""

from __future__ import annotations

import itertools
import math

from ..run.parking import BAND_ROWS
from ..run.rows import Split
from .program import TILES, Program, Step
from .tiled import TiledProgram

#: Rows that parts begin with a multiple of where no sums ask for more: at an encoder's lowest resolution, of what each
#: stage of a decoder makes.
_STEP = 8


def row_stages(program: Program, height: int, count: int) -> list[tuple[tuple[Step, ...], Split]]:
    """Steps that follow each other, with the split of what goes into them, for so many ranks; height: of frames that go
    into the program.

    What sees whole frames is made by all ranks. A decoder's other stages are split each at its own resolution, as
    equally as that allows; all of an encoder's steps follow one split, whose parts stay blocks of sums on their way
    down.
    """
    block = BAND_ROWS if any(s.groups for s in program.every()) else _STEP
    if program.half == "decoder":
        first, *later = program.stages()
        out, rows = [(first, Split((0, height), True))], height * _grows(first)
        for stage in later:
            out.append((stage, Split.of(rows, count, block // _grows(stage), stage[0].wider)))
            rows *= _grows(stage)
        return out
    tiles = program.before(TILES)
    steps, low = program.steps[:tiles], program.steps[tiles:]
    down = math.prod(s.space[1] for s in steps)
    split = Split.of(height, count, down * block)
    return [(steps, split), (low, Split((0, height // down), True))]


def row_splits(program: Program, height: int, count: int) -> tuple[Split, ...]:
    """Of what goes into each of `row_stages`."""
    return tuple(split for _, split in row_stages(program, height, count))


def why_no_rows(program: Program, height: int, count: int) -> str | None:
    """Why a network does not make rows of frames of so many that go in, or None."""
    if program.style.still or program.late or program.gathers or isinstance(program, TiledProgram):
        return "frames of this network are not split into rows"
    stages = row_stages(program, height, count)
    steps = stages[1:] if program.half == "decoder" else stages[:1]
    if other := next((s.name for s in itertools.chain(*(s for s, _ in steps)) if not s.by_rows), None):
        return f"its step {other} does not make rows of a frame"
    if all(split.whole for _, split in stages):
        return f"{height} rows are too few for {count} parts"
    return None


def _grows(stage: tuple[Step, ...]) -> int:
    return math.prod(step.space[0] for step in stage)
