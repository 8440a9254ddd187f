"""Tiles of int8 products per generation."""

from __future__ import annotations

from dataclasses import dataclass

from ..targets import Target


@dataclass(frozen=True)
class Schedule:
    """Rows, columns and depth of one program's step; warps; stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


#: Generations whose products have a kernel; others take the library's, and a pass over its sums. Of four tiles on an
#: H200 this was the fastest for each of MiniMax H3's products (816 to 930 TOP/s).
PRODUCTS = {90: Schedule(128, 256, 128, 8, 3)}
#: Tiles of rows that share tiles of the weight.
GROUP = 8


def pick(here: Target, outputs: int, depth: int) -> Schedule | None:
    """Return the tiles of products with so many outputs and columns; None where there is no kernel for them."""
    found = PRODUCTS.get(here.sm) if here.tma else None
    return None if found is None or outputs % found.columns or depth % found.depth else found
