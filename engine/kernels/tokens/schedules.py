"""Tiles of int8 products per generation."""

from __future__ import annotations

from dataclasses import dataclass

from ..conv3d.schedules import Schedule
from ..targets import Target


@dataclass(frozen=True)
class Steps:
    """Queries of one program of attention and keys of one step; warps; stages."""

    queries: int
    keys: int
    warps: int
    stages: int


#: Generations whose products have a kernel; others take the library's, and a pass over its sums. On an H200 this tile
#: took 333, 151, 852 and 398 us for the four products of a layer of MiniMax H3 (7 tiles of 1344x768, codes evenly
#: distributed), one of 256 columns in eight warps 403, 171, 928 and 402.
PRODUCTS = {90: Schedule(128, 128, 128, 4, 3)}
#: Generations whose attention has a kernel; others take the library's. On an H200 a layer's took 420 us, with 64
#: queries 436, with eight warps 456, with 128 keys 511 or more; the library's, tile by tile, 597.
ATTENTION = {90: Steps(128, 64, 4, 3)}
#: Tiles of rows that share tiles of the weight. Of 8, 16 and 32 on an H200 the product with the gate took 746, 714 and
#: 706 us, that for queries, keys and values 274, 280 and 276.
GROUP = 16


def pick(here: Target, outputs: int, depth: int) -> Schedule | None:
    """Return the tiles of products with so many outputs and columns; None where there is no kernel for them."""
    found = PRODUCTS.get(here.sm) if here.tma else None
    return None if found is None or outputs % found.columns or depth % found.depth else found
