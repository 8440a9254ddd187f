"""Causal history that waits in host memory while its convolution is not running, and visits the GPU band by band."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.pinned import POOL
from .memory import ALIGN, Plane, fill_head

#: Bands start at multiples of this many output rows, where their sums for the next norm are the frame's own.
BAND_ROWS = 64


@dataclass(frozen=True)
class Parking:
    """Which histories wait in host memory (by convolution key, or all of them), and the GPU buffers they visit.

    A convolution runs in bands of as many rows (a multiple of 64) as a buffer of `band_bytes` holds, or of `rows`.
    `prefetch` off copies when the data is needed, on the GPU's own queue.
    """

    keys: frozenset[str] | None
    band_bytes: int
    buffers: int = 2
    rows: int = 0
    prefetch: bool = True

    def holds(self, key: str) -> bool:
        return self.keys is None or key in self.keys


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
class _History:
    """One convolution's last frames in host memory [halo, H + 2, W + 2, C], oldest at slot `oldest`."""

    plane: Plane
    halo: int
    dtype: torch.dtype
    band: int
    data: Tensor | None = None
    oldest: int = 0
    started: bool = False
    stored: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return self.halo * math.prod(self.plane) * self.dtype.itemsize

    def fresh(self, slots: int) -> tuple[int, int]:
        """(how many of the last of `slots` frames to store, slot of the first): a running history takes only what is
        new, in place of what is oldest."""
        count = min(slots - self.halo, self.halo) if self.started else self.halo
        return count, self.oldest if count < self.halo else 0


@dataclass
class _Buffer:
    """Memory on the GPU that one use after another works in."""

    data: Tensor
    holds: tuple[str, Band] | None = None
    arrived: torch.cuda.Event | None = None
    #: What the next use of this memory waits for: its history is stored, its convolution done.
    stored: torch.cuda.Event | None = None
    read: torch.cuda.Event | None = None


class Parked:
    """All parked histories of a Run. Uses (a key and a band) come in the order that the Run's walk noted them."""

    def __init__(self, parking: Parking, device: torch.device) -> None:
        self.parking = parking
        self.device = device
        #: Uses still to come: noted while the Run is dry, consumed by `enter`.
        self.coming: deque[tuple[str, Band]] = deque()
        self._histories: dict[str, _History] = {}
        self._largest = 0
        self._block: Tensor | None = None
        self._buffers: list[_Buffer] = []
        self._turn = 0
        self._aside = parking.prefetch and device.type == "cuda"
        self._in, self._out = (torch.cuda.Stream(device) if self._aside else None for _ in range(2))

    @property
    def nbytes(self) -> int:
        return self.parking.buffers * self._largest

    @property
    def host_bytes(self) -> int:
        return sum(h.nbytes for h in self._histories.values())

    def bands(
        self, key: str, plane: Plane, dtype: torch.dtype, halo: int, frames: int, rows: int, step: int, reach: int
    ) -> Iterator[Band]:
        """The bands a convolution's output `rows` are computed in. Asked first for the most frames it will get at once,
        which settles how tall they are."""
        if key not in self._histories:
            line = (halo + frames) * plane[1] * plane[2] * dtype.itemsize
            fit = (self.parking.band_bytes // line - reach) // step + 1
            band = max((self.parking.rows or fit) // BAND_ROWS, 1) * BAND_ROWS
            self._histories[key] = _History(plane, halo, dtype, band)
        return split_rows(rows, step, reach, self._histories[key].band)

    def note(self, key: str, band: Band, frames: int) -> None:
        """Dry: this use is going to come."""
        history = self._histories[key]
        size = self._bytes(history, band, frames)
        self._largest = max(self._largest, -(-size // ALIGN) * ALIGN)
        self.coming.append((key, band))

    def allocate(self) -> None:
        if not self._histories:
            return
        self._block = POOL.take(self.host_bytes)
        start = 0
        for history in self._histories.values():
            shape = (history.halo, *history.plane)
            history.data = self._block[start : start + history.nbytes].view(history.dtype).view(shape)
            start += history.nbytes
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self._buffers = [_Buffer(part) for part in memory.split(self._largest)]
        self._turn = 0
        self.coming.clear()

    def free(self) -> None:
        self.wait()
        if self._block is not None:
            POOL.give(self._block)
        self._block = None
        self._buffers = []
        for history in self._histories.values():
            history.data = None

    def wait(self) -> None:
        """Until every copy is done."""
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()

    def restart(self) -> None:
        """Forget the clip."""
        for buffer in self._buffers:
            buffer.holds = None
        self.coming.clear()
        for history in self._histories.values():
            history.started, history.oldest = False, 0

    # -- between passes --------------------------------------------------------------------------------------------

    @property
    def holding(self) -> list[str]:
        """Keys of all convolutions whose history waits here."""
        return list(self._histories)

    def history(self, key: str) -> list[Tensor]:
        """The `halo` last frames of `key` in host memory, oldest first. Empty before its clip's first pass."""
        history = self._histories[key]
        if not history.started:
            return []
        self.wait()
        return [history.data[(history.oldest + i) % history.halo] for i in range(history.halo)]

    def adopt(self, key: str, frames: Tensor) -> None:
        """`key` goes on behind these frames [halo, H + 2, W + 2, C], oldest first."""
        history = self._histories[key]
        self.wait()
        history.data.copy_(frames)
        history.started, history.oldest = True, 0

    # -- one use ---------------------------------------------------------------------------------------------------

    def enter(self, key: str, band: Band, frames: int) -> Tensor:
        """[halo + frames, rows, W + 2, C] on the GPU; new frames go behind the history, which may still be under way
        (`arrive`)."""
        if self.coming and self.coming[0] == (key, band):
            self.coming.popleft()
        else:  # not announced: nothing can be fetched ahead
            self.coming.clear()
        buffer = self._buffers[self._turn]
        if buffer.holds != (key, band):
            self._fetch(buffer, key, band)
        if self._aside and buffer.stored is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.stored)
        seen = {key}
        for ahead, use in zip(range(1, len(self._buffers)), self.coming, strict=False):
            # The same convolution's next pass reads what this one is about to store.
            if use[0] in seen and use[1].first == 0:
                break
            seen.add(use[0])
            following = self._buffers[(self._turn + ahead) % len(self._buffers)]
            if following.holds != use:
                self._fetch(following, *use)
        return self._view(buffer, self._histories[key], band, frames)

    def arrive(self, key: str, band: Band, data: Tensor, head: str) -> None:
        """New frames are in `data`; from now on the history is, too. What the next pass needs of it is stored while
        the convolution runs."""
        history, buffer = self._histories[key], self._buffers[self._turn]
        if not history.started:
            fill_head(data, list(range(history.halo + 1)), head)
        elif buffer.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.arrived)
        count, first = history.fresh(data.shape[0])
        rows = band.stored - band.top
        if self._aside:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
            self._out.wait_event(ready)
        with _on(self._out):
            for i in range(count):
                target = history.data[(first + i) % history.halo, band.top : band.stored]
                target.copy_(data[data.shape[0] - count + i, :rows], non_blocking=self._aside)
        if self._aside:
            buffer.stored = history.stored = torch.cuda.Event()
            buffer.stored.record(self._out)

    def leave(self, key: str, band: Band, data: Tensor) -> None:
        """The convolution has read `data`."""
        history, buffer = self._histories[key], self._buffers[self._turn]
        buffer.holds = None
        if self._aside:
            buffer.read = torch.cuda.Event()
            buffer.read.record(torch.cuda.current_stream(self.device))
        if band.bottom == band.stored:  # the last band
            count, first = history.fresh(data.shape[0])
            history.oldest = (first + count) % history.halo
            history.started = True
        self._turn = (self._turn + 1) % len(self._buffers)

    def _fetch(self, buffer: _Buffer, key: str, band: Band) -> None:
        history = self._histories[key]
        buffer.holds = (key, band)
        buffer.arrived = None
        if not history.started:
            return
        if self._aside:
            for event in (buffer.stored, buffer.read, history.stored):
                if event is not None:
                    self._in.wait_event(event)
        with _on(self._in):
            target = self._view(buffer, history, band, 0)
            for i in range(history.halo):
                source = history.data[(history.oldest + i) % history.halo, band.top : band.bottom]
                target[i].copy_(source, non_blocking=self._aside)
        if self._aside:
            buffer.arrived = torch.cuda.Event()
            buffer.arrived.record(self._in)

    def _view(self, buffer: _Buffer, history: _History, band: Band, frames: int) -> Tensor:
        size = self._bytes(history, band, frames)
        shape = (history.halo + frames, band.bottom - band.top, *history.plane[1:])
        return buffer.data[:size].view(history.dtype).view(shape)

    @staticmethod
    def _bytes(history: _History, band: Band, frames: int) -> int:
        rows = (band.bottom - band.top) * history.plane[1] * history.plane[2]
        return (history.halo + frames) * rows * history.dtype.itemsize


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
