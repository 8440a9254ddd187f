"""Storage of a convolution's causal history between its uses, in host memory or on the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from .rings import Piece, Plane


@dataclass(frozen=True)
class Band:
    """Output rows [first, last) of a convolution and the bordered input rows [top, bottom) that they read.

    stored: end of the input rows whose history this band stores: the next band's begin, or the last row's end. parts:
    the bands that this one stands for, if those are several."""

    first: int
    last: int
    top: int
    bottom: int
    stored: int
    parts: tuple[Band, ...] = ()

    def with_next(self, band: Band) -> Band:
        """Return this band and the next as one."""
        return Band(self.first, band.last, self.top, band.bottom, band.stored, (*(self.parts or (self,)), band))


def split_rows(rows: int, step: int, reach: int, band: int) -> Iterator[Band]:
    """Yield bands of `band` output rows of a convolution.

    Args:
        rows: output rows.
        step: input rows between two output rows.
        reach: input rows that an output row reads, from its first one on.
        band: output rows per band.
    """
    for first in range(0, rows, band):
        last = min(first + band, rows)
        top, bottom = first * step, (last - 1) * step + reach
        yield Band(first, last, top, bottom, bottom if last == rows else last * step)


@dataclass
class Stretch:
    """Bordered rows [first, last) of all frames of a history, [frames, rows, W + 2, C].

    They are all rows that some bands read, and after the last band the rows that no band reads."""

    first: int
    last: int
    near: bool
    data: Tensor

    def part(self, slot: int, top: int, bottom: int) -> Tensor:
        """Return rows [top, bottom) of one frame."""
        return self.data[slot, top - self.first : bottom - self.first]


@dataclass
class History:
    """One convolution's last frames [frames, H + 2, W + 2, C], the oldest at slot `oldest`.

    The rows of `near` of its bands, evenly spread, are each in a stretch on the GPU, and those of the bands between
    them are in stretches in host memory. Every band finds all rows it reads in one stretch: rows that two stretches
    need are in both."""

    plane: Plane
    frames: int
    dtype: torch.dtype
    bands: list[Band]
    #: Uses in a chunk, and operations of its convolution in all of them.
    times: int = 0
    work: int = 0
    near: int = 0
    stretches: list[Stretch] = field(default_factory=list)
    oldest: int = 0
    started: bool = False
    #: All frames are copies of one, as after a clip's first frame: only the first slot holds it.
    same: bool = False
    #: Event: the last pass has stored all that the next one fetches.
    stored: torch.cuda.Event | None = None

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of all frames."""
        return self.frames * math.prod(self.plane[1:]) * self.dtype.itemsize

    def visit_bytes(self, band: Band, frames: int) -> int:
        """Return the bytes of a band of the history with `frames` new frames after it."""
        rows = (band.bottom - band.top) * math.prod(self.plane[1:])
        return (self.frames + frames) * rows * self.dtype.itemsize

    def view(self, data: Tensor, band: Band, frames: int) -> Tensor:
        """View `data` as a band with `frames` new frames: [history + frames, rows, W + 2, C]."""
        shape = (self.frames + frames, band.bottom - band.top, *self.plane[1:])
        return data[: self.visit_bytes(band, frames)].view(self.dtype).view(shape)

    def taller(self, frames: int, room: int) -> list[Band]:
        """Return the bands of a clip's first pass, which finds no history here.

        Several bands become one as long as it takes at most `room` bytes with `frames` new frames."""
        made = [self.bands[0]]
        for band in self.bands[1:]:
            both = made[-1].with_next(band)
            if self.visit_bytes(both, frames) <= room:
                made[-1] = both
            else:
                made.append(band)
        return made

    @property
    def far_bytes(self) -> int:
        """Return the bytes that wait in host memory."""
        if self.near == len(self.bands):
            return 0
        # Between two bands on the GPU lie some in host memory, or between two of those some on the GPU.
        groups = min(self.near, len(self.bands) - self.near) or 1
        shared = sum(a.bottom - b.top for a, b in pairwise(self.bands[:2])) * (self.near + groups - 1)
        return (self.plane[0] + shared) * self.row_bytes - self.near_bytes(self.near)

    @property
    def pressure(self) -> float:
        """Return the bytes that come from the host for each operation."""
        return self.times * self.far_bytes / max(self.work, 1)

    def near_bytes(self, near: int) -> int:
        """Return the bytes that stay on the GPU if `near` bands do.

        All bands are of one height but the last, which is always among them."""
        if not near:
            return 0
        first = self.bands[0]
        return (self.plane[0] - self.bands[-1].top + (first.bottom - first.top) * (near - 1)) * self.row_bytes

    def forget(self) -> None:
        """Begin anew: the next pass finds nothing."""
        self.started, self.same, self.oldest = False, False, 0

    def allocate(self, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        """Take the stretches from the beginning of the two blocks; return the rest of the blocks."""
        self.stretches = []
        n = len(self.bands)
        spread = [(i + 1) * self.near // n > i * self.near // n for i in range(n)]
        for here, group in groupby(range(n), key=spread.__getitem__):
            for bands in [[i] for i in group] if here else [list(group)]:
                first = self.bands[bands[0]].top
                last = self.bands[bands[-1]].bottom if bands[-1] < n - 1 else self.plane[0]
                size = (last - first) * self.row_bytes
                block = near if here else far
                data = block[:size].view(self.dtype).view(self.frames, last - first, *self.plane[1:])
                self.stretches.append(Stretch(first, last, here, data))
                near, far = (near[size:], far) if here else (near, far[size:])
        return near, far

    def stretch(self, band: Band) -> Stretch:
        """Return the stretch that holds the rows of `band`."""
        return next(s for s in self.stretches if s.first <= band.top and band.bottom <= s.last)

    def fresh(self, slots: int) -> tuple[int, int]:
        """Return how many of the last of `slots` frames to store, and the slot of the first.

        A running history stores only new frames, in place of the oldest."""
        count = min(slots - self.frames, self.frames) if self.started and not self.same else self.frames
        return count, self.oldest if count < self.frames else 0

    def slot(self, frame: int) -> int:
        """Return the slot of a frame, counted from the oldest one."""
        return 0 if self.same else (self.oldest + frame) % self.frames

    def pieces(self) -> Iterator[Piece]:
        """Yield every row of every frame once, in order, in its place."""
        ends = [b.stored for b in self.bands[:-1]] + [self.plane[0]]
        for i in range(self.frames):
            for band, end in zip(self.bands, ends, strict=True):
                rows = self.stretch(band).part(self.slot(i), band.top, end)
                yield Piece(i, band.top, rows)


def keep_near(histories: Iterable[History], room: int) -> None:
    """Let bands stay on the GPU, up to `room` bytes.

    Each band in turn goes to the history that would otherwise move the most bytes per operation of its convolution, so
    that copies are hidden as well as possible."""
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
