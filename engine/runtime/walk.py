"""Records of a dry run besides arena, rings and parked histories."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.conv3d import Partials, Weight, sums_bytes


class Walk:
    """Sums for norms, which operators allocate themselves, and the repeats of steps that are run dry only once."""

    def __init__(self) -> None:
        #: Steps are run dry to learn the memory they take; they are neither computed nor announced.
        self.open = True
        #: Largest number of bytes of sums that lived at once.
        self.peak = 0
        #: Number of times that the current steps come.
        self.repeats = 1
        self._live = 0

    def spans(self, count: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of parts of `size` (0: all) of `count` frames, in order.

        While `open`, equal parts come once, counted as often as there are: a dry run takes no longer for a long chunk
        than for a short one."""
        size = size or count
        full = count // size
        if not self.open or full < 2:
            yield from ((first, min(first + size, count)) for first in range(0, count, size))
            return
        before = self.repeats
        self.repeats = before * full
        yield 0, size
        self.repeats = before
        if full * size < count:
            yield full * size, count

    def sums(self, out: Tensor, groups: int, phases: tuple[int, int] = (1, 1),
             weight: Weight | None = None) -> Partials | None:  # fmt: skip
        """Return a stand-in for the sums of `out` [D, H, W, K], which counts as long as it is referenced.

        phases: as for `sums_bytes`. weight: of the convolution that makes them."""
        if not groups:
            return None
        tiles = weight is not None and weight.tiles
        return self._stand_in(sums_bytes(tuple(out.shape), groups, phases, tiles))

    def joined(self, parts: list[Partials | None], count: int, first: int) -> Partials | None:
        """Return a stand-in for the sums of `count` frames, given those of parts, the first of `first` frames."""
        if not parts or parts[0] is None:
            return None
        size = -(-parts[0].data.numel() * count // first)
        parts.clear()
        return self._stand_in(size)

    def _stand_in(self, size: int) -> Partials:
        self.peak = max(self.peak, self._live + 2 * size)  # twice: joining parts makes a copy
        sums = torch.empty(size, dtype=torch.uint8, device="meta")
        self._live += size
        weakref.finalize(sums, self._let_go, size)
        return Partials(sums, 1)

    def _let_go(self, size: int) -> None:
        self._live -= size
