"""Descriptor of a tensor that kernels read tile by tile with bulk copies (TMA), the same for all ways to launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Descriptor:
    """One 2-D tensor and the tile that a kernel loads of it.

    base: [R, C] with unit stride over columns. block_shape: rows and columns of a tile. It is made for every launch, so
    the type and address, which a launch reads of a tensor too, are as cheap to read here.
    """

    __slots__ = ("base", "block_shape", "data_ptr", "dtype", "shape", "strides")

    def __init__(self, base: Tensor, block_shape: Sequence[int]) -> None:
        self.base = base
        self.shape = base.shape
        self.strides = base.stride()
        self.block_shape = block_shape
        self.dtype = base.dtype
        self.data_ptr = base.data_ptr
