"""Count the bytes that convolutions fetch from L2: what their tiles copy, from each launch's grid and constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ....kernels.prebuilt.launch import Prebuilt

#: Kernels whose copies are counted: the loops in Gluon, which make nearly all products of convolutions.
COUNTED = ("conv3d.mma_kernel", "conv3d.taps_kernel")


def fetched(grid: tuple[int, ...], constants: Mapping[str, Any], itemsize: int) -> int:
    """Return the bytes that a launch of a counted kernel copies from L2 to shared memory.

    Args:
        grid: blocks.
        constants: of the kernel.
        itemsize: bytes of an operand.
    """
    c, share = constants, constants["SHARE"]
    depth = c["KT"] * c["KH"] * c["KW"] * c["RUN"]  # of a tile's sum; a step's SHARE taps read the same positions
    tile = c["BM"] + 16 * (share - 1) + share * (c["BN"] + c["TAIL"])
    return math.prod(grid) * depth * tile * itemsize


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """Count what prebuilt kernels inside fetch. Yields: the bytes so far."""
    total = 0
    launch = Prebuilt._launch

    def counted(self: Prebuilt, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        nonlocal total
        if self._kernel in COUNTED:
            total += fetched(grid, constants, arguments[1].dtype.itemsize)
        launch(self, grid, *arguments, **constants)

    Prebuilt._launch = counted
    try:
        yield lambda: total
    finally:
        Prebuilt._launch = launch
