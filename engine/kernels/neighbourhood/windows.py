"""The tokens that a query attends to, and how tiles of queries find them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


def starts(position: Tensor, kernel: int, length: int) -> Tensor:
    """Return the first key of each query's window along one axis: centred, but moved inward at both ends."""
    return (position - kernel // 2).clamp(0, length - kernel)


@dataclass(frozen=True)
class Window:
    """Frames, rows and columns of tokens that one query attends to, and the clip that they lie in.

    first: the clip's frame that the queries begin with. clip: frames of the clip; while its end is unknown, any number
    that no window reaches.
    """

    kernel: tuple[int, int, int]
    first: int
    clip: int

    def within(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the kernel along each axis: no longer than the axis."""
        return tuple(min(k, n) for k, n in zip(self.kernel, (self.clip, height, width), strict=True))  # type: ignore[return-value]

    def frames(self, frame: int) -> range:
        """Return the clip's frames that the clip's frame number `frame` attends to."""
        kernel = min(self.kernel[0], self.clip)
        start = min(max(frame - kernel // 2, 0), self.clip - kernel)
        return range(start, start + kernel)


@dataclass(frozen=True)
class Regions:
    """The keys of every tile of queries in a frame, and which of them each query attends to.

    Tiles are `tile` rows and columns of queries; a tile's keys are a region of `size` rows and columns.

    bias: [classes, queries of a tile, keys], 0 where a query attends to a key and -inf elsewhere, in the type of the
        kernel's table; keys are padded to whole blocks.
    classes: int32 [tiles], the entry of `bias` that a tile uses. All tiles away from the borders share one.
    """

    tile: tuple[int, int]
    size: tuple[int, int]
    grid: tuple[int, int]
    bias: Tensor
    classes: Tensor


@functools.lru_cache(maxsize=64)
def regions(
    height: int, width: int, kernel: tuple[int, int], tile: tuple[int, int], size: tuple[int, int], block: int,
    device: torch.device,
) -> Regions:  # fmt: skip
    """Return the regions of a frame of height x width tokens, for keys in blocks of `block`. They have `size` rows and
    columns even where the frame has fewer."""
    keys = torch.arange(-(-size[0] * size[1] // block) * block)
    places = (keys // size[1]).clamp(max=size[0] - 1), keys % size[1]
    axes = [_attends(n, k, t, s) for n, k, t, s in zip((height, width), kernel, tile, size, strict=True)]
    (rows, row_class), (columns, column_class) = (torch.unique(a, dim=0, return_inverse=True) for a in axes)
    seen = rows[:, None, :, None, places[0]] & columns[None, :, None, :, places[1]] & (keys < size[0] * size[1])
    bias = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf).view(-1, math.prod(tile), len(keys))
    classes = row_class[:, None] * len(columns) + column_class[None, :]
    grid = len(row_class), len(column_class)
    return Regions(tile, size, grid, bias.to(device, torch.bfloat16), classes.flatten().int().to(device))


def _attends(length: int, kernel: int, tile: int, size: int) -> Tensor:
    """Return bool [tiles, queries of a tile, keys of its region] along one axis."""
    first = torch.arange(0, length, tile)
    queries = (first[:, None] + torch.arange(tile)).clamp_(max=length - 1)
    keys = (first - kernel // 2).clamp(max=length - size).clamp_(min=0)[:, None] + torch.arange(size)
    begin = starts(queries, kernel, length)[..., None]
    return (keys[:, None] >= begin) & (keys[:, None] < begin + kernel)
