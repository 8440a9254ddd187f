"""Places and weights of blended tiles.

Positions are in latent pixels, weights in output samples (`scale` per latent pixel). Tiles of an axis all have the same
size and are spread evenly, so the last one is never a sliver; neighbours share at least the requested overlap."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError

#: Least size in latent pixels; a smaller tile is all border.
MIN_TILE = 2


@dataclass(frozen=True)
class Axis:
    """Tiles of one axis: [start, start + size) each, in latent pixels, over `length` of them."""

    length: int
    size: int
    starts: tuple[int, ...]
    blend: bool

    def spans(self) -> list[tuple[int, int]]:
        return [(s, s + self.size) for s in self.starts]

    def weights(self, index: int, scale: int = 1) -> Tensor:
        """Return the weight of tile `index`, float32 [size * scale].

        It is 1 inside, with raised-cosine ramps where neighbours overlap. The weights of all tiles sum to 1 at every
        sample, and none is zero inside its tile when blending."""
        return _weights(self, scale)[index]

    def _raw(self, index: int, scale: int) -> Tensor:
        weight = torch.ones(self.size * scale, dtype=torch.float64, device="cpu")
        if index > 0:
            n = (self.starts[index - 1] + self.size - self.starts[index]) * scale
            weight[:n] *= self._ramp(n)
        if index + 1 < len(self.starts):
            n = (self.starts[index] + self.size - self.starts[index + 1]) * scale
            weight[weight.numel() - n :] *= 1.0 - self._ramp(n)
        return weight

    def _ramp(self, n: int) -> Tensor:
        position = (torch.arange(n, dtype=torch.float64, device="cpu") + 0.5) / max(n, 1)
        if self.blend:
            return 0.5 - 0.5 * torch.cos(math.pi * position)
        return (position > 0.5).double()


@functools.lru_cache(maxsize=8)
def _weights(axis: Axis, scale: int) -> list[Tensor]:
    raw = [axis._raw(i, scale) for i in range(len(axis.starts))]
    spans = [(scale * lo, scale * hi) for lo, hi in axis.spans()]
    total = torch.zeros(axis.length * scale, dtype=torch.float64, device="cpu")
    for (lo, hi), weight in zip(spans, raw, strict=True):
        total[lo:hi] += weight
    return [(weight / total[lo:hi]).float() for (lo, hi), weight in zip(spans, raw, strict=True)]


@dataclass(frozen=True)
class Grid:
    """Tiles of a frame: the product of its rows and columns."""

    rows: Axis
    cols: Axis

    def __len__(self) -> int:
        return len(self.rows.starts) * len(self.cols.starts)

    def indices(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(len(self.rows.starts)) for j in range(len(self.cols.starts))]


def check_tile(tile: int, overlap: int, scale: int) -> None:
    """Refuse sizes that no grid can have; tile 0 means automatic. Raises InputError.

    Args:
        tile, overlap: in pixels.
        scale: pixels per latent pixel.
    """
    least = MIN_TILE * scale
    if tile < 0 or 0 < tile < least:
        raise InputError(f"tile={tile} is too small: use at least {least} pixels, or 0 for automatic")
    if overlap < 0:
        raise InputError(f"overlap={overlap} is below 0: use 0 or more pixels")
    if tile and overlap >= tile:
        raise InputError(f"overlap={overlap} must be smaller than tile={tile}")


def axis(length: int, size: int, overlap: int, blend: bool) -> Axis:
    """Return evenly spread tiles of `size` over `length`, sharing at least `overlap`; all in latent pixels."""
    if size >= length:
        return Axis(length, length, (0,), blend)
    overlap = min(overlap, size - 1)
    count = math.ceil((length - overlap) / (size - overlap))
    starts = tuple(round(i * (length - size) / (count - 1)) for i in range(count))
    return Axis(length, size, starts, blend)


def grid(height: int, width: int, tile: int, overlap: int, scale: int) -> Grid:
    """Return a grid of tiles over a frame.

    The tile is rounded down to whole latent pixels (memory stays below the requested size), the overlap up.

    Args:
        height, width: of the frame, in latent pixels.
        tile, overlap: in pixels.
        scale: pixels per latent pixel.
    """
    size, shared = max(tile // scale, 1), -(-overlap // scale)
    return Grid(axis(height, size, shared, overlap > 0), axis(width, size, shared, overlap > 0))


def shrinking(height: int, width: int, overlap: int, scale: int) -> Iterator[Grid]:
    """Yield grids from the whole frame down to the smallest tiles that still have more than the overlap."""
    yield grid(height, width, scale * max(height, width), overlap, scale)
    tile = max(height, width)
    smallest = max(2, 2 * (-(-overlap // scale)))
    while tile > smallest:
        tile = max(smallest, tile * 3 // 4)
        yield grid(height, width, scale * tile, overlap, scale)
