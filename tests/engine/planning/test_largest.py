"""The largest tiles that fit are those of a search through all, and few are asked for."""

import pytest
from zerowaste_vae.engine.network.tiles import shrinking
from zerowaste_vae.engine.planning.largest import largest

FIXED = 1000
GRIDS = list(shrinking(270, 480, 64, 8))


def by_area(grid):
    return FIXED + 7 * grid.rows.size * grid.cols.size


def by_more(grid):
    """As features of whole frames and the borders of tiles add to it."""
    return FIXED + 90_000 + 7 * (grid.rows.size + 3) * (grid.cols.size + 3)


def by_side(grid):
    """Nothing like the area."""
    return FIXED + grid.rows.size


def searched(target, least):
    """Return the result of `largest`, and the number of tiles it asks for."""
    asked = []

    def counted(grid):
        asked.append(grid)
        return least(grid)

    return largest(GRIDS, target, FIXED, counted), len(asked)


@pytest.mark.parametrize("least, most", [(by_area, 3), (by_more, 6), (by_side, 7)])
def test_few_walks(least, most):
    """The largest that fits is found with few walks."""
    for grid in GRIDS[1:]:
        found, asked = searched(least(grid), least)
        assert found == next(i for i, g in enumerate(GRIDS[1:], 1) if least(g) <= least(grid))
        assert asked <= most < len(GRIDS)


def test_none_may_fit():
    assert searched(FIXED, by_area)[0] == len(GRIDS)
    assert searched(by_more(GRIDS[-1]) - 1, by_more)[0] == len(GRIDS)
