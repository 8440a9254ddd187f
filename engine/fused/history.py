"""Where the rows of a convolution's causal history wait between its uses: in host memory or on the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import groupby

import torch
from torch import Tensor

from .memory import Plane


@dataclass(frozen=True)
class Band:
    """Output rows [first, last) of a convolution, the bordered input rows [top, bottom) they read, and where the next
    band's begin (or the last row ends): history up to there is this band's to store."""

    first: int
    last: int
    top: int
    bottom: int
    stored: int


def split_rows(rows: int, step: int, reach: int, band: int) -> Iterator[Band]:
    """Bands of `band` of a convolution's output `rows`; `step` input rows lie between two of them and each reads
    `reach` from its first one on."""
    for first in range(0, rows, band):
        last = min(first + band, rows)
        top, bottom = first * step, (last - 1) * step + reach
        yield Band(first, last, top, bottom, bottom if last == rows else last * step)


@dataclass
class Segment:
    """Bordered rows [first, last) of all frames of a history: [halo, rows, W + 2, C]."""

    first: int
    last: int
    data: Tensor


@dataclass
class History:
    """One convolution's last frames [halo, H + 2, W + 2, C], oldest at slot `oldest`, in as many segments as it takes:
    the rows of `near` of its bands, evenly spread, on the GPU, the others in host memory."""

    plane: Plane
    halo: int
    dtype: torch.dtype
    bands: list[Band]
    #: Uses in a chunk, and operations of its convolution in all of them.
    times: int = 0
    work: int = 0
    near: int = 0
    segments: list[Segment] = field(default_factory=list)
    oldest: int = 0
    started: bool = False
    stored: torch.cuda.Event | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all frames."""
        return self.halo * math.prod(self.plane[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.plane[0] * self.row_bytes

    @property
    def far_bytes(self) -> int:
        """What waits in host memory."""
        return self.nbytes - self.near_bytes(self.near)

    @property
    def pressure(self) -> float:
        """Bytes that come from the host for each operation."""
        return self.times * self.far_bytes / max(self.work, 1)

    def near_bytes(self, near: int) -> int:
        """What stays on the GPU if `near` bands do. All are of one height but the last, which is always among them."""
        if not near:
            return 0
        return (self.plane[0] - self.bands[-1].top + sum(b.top for b in self.bands[1:2]) * (near - 1)) * self.row_bytes

    def allocate(self, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        """Take the segments from the two blocks' beginning; returns what is left of the blocks."""
        self.segments = []
        n, last = len(self.bands), 0
        spread = [(i + 1) * self.near // n > i * self.near // n for i in range(n)]
        for here, group in groupby(range(n), key=spread.__getitem__):
            first, end = last, max(group) + 1
            last = self.bands[end].top if end < n else self.plane[0]
            size = (last - first) * self.row_bytes
            block = near if here else far
            data = block[:size].view(self.dtype).view(self.halo, last - first, *self.plane[1:])
            self.segments.append(Segment(first, last, data))
            if here:
                near = near[size:]
            else:
                far = far[size:]
        return near, far

    def rows(self, slot: int, top: int, bottom: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows [top, bottom) of one frame where they wait, each part with its place among them."""
        for segment in self.segments:
            a, b = max(top, segment.first), min(bottom, segment.last)
            if a < b:
                yield slice(a - top, b - top), segment.data[slot, a - segment.first : b - segment.first]

    def fresh(self, slots: int) -> tuple[int, int]:
        """(how many of the last of `slots` frames to store, slot of the first): a running history takes only what is
        new, in place of what is oldest."""
        count = min(slots - self.halo, self.halo) if self.started else self.halo
        return count, self.oldest if count < self.halo else 0

    def frames(self) -> list[Tensor]:
        """In host memory, oldest first."""
        return [self._frame((self.oldest + i) % self.halo) for i in range(self.halo)]

    def _frame(self, slot: int) -> Tensor:
        parts = [part.cpu() for _, part in self.rows(slot, 0, self.plane[0])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def keep_near(histories: Iterable[History], room: int) -> None:
    """Let bands stay on the GPU, up to `room` bytes: one after the other of the history that would otherwise move the
    most bytes for each operation of its convolution, so that copies end up as well hidden as they can be."""
    waiting = []
    for order, history in enumerate(histories):
        history.near = 0
        waiting.append((-history.pressure, order, history))
    heapify(waiting)
    while waiting:
        _, order, history = waiting[0]
        more = history.near_bytes(history.near + 1) - history.near_bytes(history.near)
        if more <= room:
            history.near += 1
            room -= more
        if more > room or history.near == len(history.bands):
            heappop(waiting)
        else:
            heapreplace(waiting, (-history.pressure, order, history))
