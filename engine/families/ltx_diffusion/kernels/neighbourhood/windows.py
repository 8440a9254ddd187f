"""The tokens that a query attends to, and how tiles of queries find them."""

from __future__ import annotations

import functools
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
    that no window reaches. origin: where the clip is a part of a longer one, that one's frame that it begins with.
    """

    kernel: tuple[int, int, int]
    first: int
    clip: int
    origin: int = 0

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

    rows: bool [kinds of tiles by rows, rows of queries, rows of keys], True where a query attends to a key.
    columns: the same along columns.
    down, across: int64 [tiles], the kind of every tile along each axis.
    """

    rows: Tensor
    columns: Tensor
    down: Tensor
    across: Tensor

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.down), len(self.across)

    def hidden(self, keys: Tensor, step: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what the kernel adds to logits, as a product with each query's row and column of its tile.

        Args:
            keys: int64, a region's keys in the kernel's order, as `order` has them.
            step: keys that the kernel takes at once.

        Returns:
            [kinds, keys, TERMS], and hidden ones up to a whole step: 0 where the query of a tile's row r (term r), or
                column c (term rows + c), attends to the key, else HIDDEN.
            int32 [tiles], the kind of every tile.
        """
        (_, tall, high), (_, wide, long) = self.rows.shape, self.columns.shape
        seen = torch.ones(len(self.rows), len(self.columns), high, long, TERMS, dtype=torch.bool, device="cpu")
        seen[..., :tall] = self.rows.transpose(1, 2)[:, None, :, None]
        seen[..., tall : tall + wide] = self.columns.transpose(1, 2)[None, :, None]
        kinds = self.down[:, None] * len(self.columns) + self.across
        seen = seen.view(-1, high * long, TERMS)
        table = torch.full((len(seen), -(-len(keys) // step) * step, TERMS), HIDDEN, dtype=torch.float32, device="cpu")
        table[:, : len(keys)].masked_fill_(seen[:, keys], 0.0)
        return table.to(device, dtype), kinds.flatten().int().to(device)


def whole(columns: int) -> int:
    """Return the columns of a region that its first steps take: the largest power of two among so many."""
    return 1 << (columns.bit_length() - 1)


def order(rows: int, columns: int) -> Tensor:
    """Return the keys of a region in the order in which kernels take them, each as row * columns + column: `whole`
    columns of all rows, so that a step has whole rows of these, then the rest."""
    keys = torch.arange(rows * columns, device="cpu").view(rows, columns)
    return torch.cat([part.flatten() for part in keys.tensor_split((whole(columns),), 1)])


def in_rows(rows: int, columns: int, step: int) -> Tensor:
    """Return the keys of a region row by row, then a step of those that fill none, again and again."""
    keys = torch.arange(rows * columns, device="cpu")
    whole, rest = keys.split((rows * columns // step * step, rows * columns % step))
    return torch.cat((whole, rest.repeat(step // len(rest))))


#: What hides a key from a query; fp16 holds it.
HIDDEN = -32768.0
#: Most rows and columns of queries that a tile has together.
TERMS = 16


def regions(height: int, width: int, kernel: tuple[int, int], tile: tuple[int, int], size: tuple[int, int]) -> Regions:
    """Return the regions of a frame of height x width tokens. They have `size` rows and columns even where the frame
    has fewer."""
    axes = [_attends(n, k, t, s) for n, k, t, s in zip((height, width), kernel, tile, size, strict=True)]
    (rows, down), (columns, across) = (torch.unique(a, dim=0, return_inverse=True) for a in axes)
    return Regions(rows, columns, down, across)


@functools.lru_cache(maxsize=64)
def hidden(
    height: int, width: int, kernel: tuple[int, int], tile: tuple[int, int], size: tuple[int, int], step: int,
    dtype: torch.dtype, device: torch.device, wide: bool = False,
) -> tuple[Tensor, Tensor, tuple[int, int]]:  # fmt: skip
    """Return `Regions.hidden` of the `regions` of a frame, and how many tiles lie below and beside each other. wide:
    keys are `in_rows`, not in `order`."""
    found = regions(height, width, kernel, tile, size)
    keys = in_rows(*size, step) if wide else order(*size)
    return *found.hidden(keys, step, dtype, device), found.grid


def _attends(length: int, kernel: int, tile: int, size: int) -> Tensor:
    """Return bool [tiles, queries of a tile, keys of its region] along one axis."""
    first = torch.arange(0, length, tile, device="cpu")
    queries = (first[:, None] + torch.arange(tile, device="cpu")).clamp_(max=length - 1)
    keys = (first - kernel // 2).clamp(max=length - size).clamp_(min=0)[:, None] + torch.arange(size, device="cpu")
    begin = starts(queries, kernel, length)[..., None]
    return (keys[:, None] >= begin) & (keys[:, None] < begin + kernel)
