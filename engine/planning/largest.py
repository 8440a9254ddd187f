"""The largest tiles that fit, with few walks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..run.tiles import Grid

#: Sizes that are guessed from what the last tiles took, before those that are left are halved.
GUESSES = 4


def largest(grids: Sequence[Grid], target: int, fixed: int, least: Callable[[Grid], int]) -> int:
    """The place of the first of `grids`, from large to small tiles, that takes no more than `target`; their number
    where none does. The very first one is known to be too large.

    least: bytes that a plan takes with tiles; what it takes besides those that are `fixed` goes about with their area,
    so that two or three are asked for. Only which of them fit decides.
    """
    areas = [grid.rows.size * grid.cols.size for grid in grids]
    at, found, above, below, walks = 0, least(grids[0]), 0, len(grids), 0
    while below - above > 1:
        most = (target - fixed) * areas[at] / (found - fixed)
        guess = next((i for i in range(above + 1, below - 1) if areas[i] <= most), below - 1)
        at, walks = guess if walks < GUESSES else (above + below) // 2, walks + 1
        found = least(grids[at])
        above, below = (above, at) if found <= target else (at, below)
    return below
