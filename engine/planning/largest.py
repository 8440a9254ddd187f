"""Find the largest tiles that fit, with few dry runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..network.tiles import Grid

#: Sizes that are guessed from the bytes of others, before the search goes on by bisection.
GUESSES = 5


def largest(grids: Sequence[Grid], target: int, fixed: int, least: Callable[[Grid], int]) -> int:
    """Return the index of the first grid that needs at most `target` bytes; their number where none does.

    Bytes above `fixed` are about proportional to the area of a tile, so two or three calls of `least` are usual. The
    guesses choose only which grids are tried; the result depends on which of them fit.

    Args:
        grids: from large to small tiles; the first one is known to be too large.
        target: bytes.
        fixed: bytes that do not depend on the tiles.
        least: returns the bytes of the leanest plan with a grid.
    """
    areas = [grid.rows.size * grid.cols.size for grid in grids]
    above, below = 0, len(grids)
    #: Area and bytes of the smallest tiles that are too large, and of the largest that are not.
    high, low = (areas[0], least(grids[0])), (0, fixed)
    for tries in range(len(grids)):
        if below - above == 1:
            break
        at = (above + below) // 2
        if tries == 2 and below == len(grids):  # the guesses were wrong: perhaps nothing fits
            at = below - 1
        elif tries < GUESSES:
            most = low[0] + (target - low[1]) * (high[0] - low[0]) / max(high[1] - low[1], 1)
            at = next((i for i in range(above + 1, below - 1) if areas[i] <= most), below - 1)
        found = areas[at], least(grids[at])
        if found[1] <= target:
            below, low = at, found
        else:
            above, high = at, found
    return below
