"""Causal history that waits outside the rings while its convolution is not running, and visits the GPU's working memory
band by band."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .arena import ALIGN
from .history import Band, History, keep_near, split_rows
from .pinned import POOL
from .rings import Piece, Plane, fill_head

#: Host memory that is locked besides where some histories stay on the GPU, and at most this part of theirs: the next
#: plan of the same clip may find less GPU memory free (packed weights, a library's workspace) and keep fewer there.
#: Locking 9.3 GB anew took 3.5 s.
SPARE_BYTES, SPARE_SHARE = 256 << 20, 32
#: Bands start at multiples of this many output rows, where their sums for the next norm are the frame's own.
BAND_ROWS = 64


@dataclass(frozen=True)
class Parking:
    """Which histories wait outside the rings (by convolution key, or all of them), and the GPU buffers they visit.

    A convolution runs in bands of as many rows (a multiple of 64) as a buffer of `band_bytes` holds, or of `rows`.
    `prefetch` off copies when the data is needed, on the GPU's own queue. Of the histories, `near` bytes at most stay
    on the GPU, where they need no slots for new frames as a ring does; the others are in host memory. Copies within
    the GPU always are on its own queue: they are kernels, and beside a convolution they would wait for it and hold up
    the copies behind them.
    """

    keys: frozenset[str] | None
    band_bytes: int
    buffers: int = 2
    rows: int = 0
    prefetch: bool = True
    near: int = 0

    def holds(self, key: str) -> bool:
        return self.keys is None or key in self.keys


@dataclass
class Buffer:
    """Memory on the GPU that one use after another works in; in use, `view` is [history + frames, rows, W + 2, C]."""

    data: Tensor
    holds: tuple[str, Band] | None = None
    view: Tensor | None = None
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
        self._histories: dict[str, History] = {}
        self._largest = 0
        self._placed = False
        self._block: Tensor | None = None
        self._buffers: list[Buffer] = []
        self._turn = 0
        self._aside = parking.prefetch and device.type == "cuda"
        self._in, self._out = (torch.cuda.Stream(device) if self._aside else None for _ in range(2))

    @property
    def nbytes(self) -> int:
        self._place()
        near = sum(h.near_bytes(h.near) for h in self._histories.values())
        return self.parking.buffers * self._largest + near

    @property
    def host_bytes(self) -> int:
        return sum(self._far_bytes())

    def moved(self, key: str) -> tuple[int, int, int]:
        """How often bands of `key` are used in a chunk, and the bytes that visit the buffers for them: from the GPU's
        own memory, from the host's."""
        self._place()
        if (history := self._histories.get(key)) is None:
            return 0, 0, 0
        times = history.times
        return times * len(history.bands), times * history.near_bytes(history.near), times * history.far_bytes

    def bands(
        self, key: str, plane: Plane, dtype: torch.dtype, kept: int, frames: int, rows: int, step: int, reach: int,
        work: int, times: int = 1,
    ) -> Sequence[Band]:  # fmt: skip
        """The bands a convolution's output `rows` are computed in, with `work` operations, `times` times over.
        Asked first for the most frames it will get at once, which settles how tall they are."""
        if key not in self._histories:
            line = (kept + frames) * plane[1] * plane[2] * dtype.itemsize
            fit = (self.parking.band_bytes // line - reach) // step + 1
            band = max((self.parking.rows or fit) // BAND_ROWS, 1) * BAND_ROWS
            self._histories[key] = History(plane, kept, dtype, list(split_rows(rows, step, reach, band)))
        history = self._histories[key]
        if not self._buffers:
            history.times += times
            history.work += times * work
            self._placed = False
        return history.bands

    def note(self, key: str, band: Band, frames: int) -> None:
        """Dry: this use is going to come."""
        size = _bytes(self._histories[key], band, frames)
        self._largest = max(self._largest, -(-size // ALIGN) * ALIGN)
        self.coming.append((key, band))

    def allocate(self) -> None:
        if not self._histories:
            return
        size, spare = self._far_bytes()
        self._block = POOL.take(size, spare) if size else None
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        visited = self.parking.buffers * self._largest
        self._buffers = [Buffer(part) for part in memory[:visited].split(self._largest)]
        near, far = memory[visited:], memory[:0] if self._block is None else self._block
        for history in self._histories.values():
            near, far = history.allocate(near, far)
        self._turn = 0
        self.coming.clear()

    def free(self) -> None:
        self.wait()
        if self._block is not None:
            POOL.give(self._block)
        self._block = None
        self._buffers = []
        for history in self._histories.values():
            history.segments = []

    def wait(self) -> None:
        """Until every copy is done."""
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()

    def restart(self) -> None:
        """Forget the clip."""
        for buffer in self._buffers:
            buffer.holds = buffer.view = None
        self.coming.clear()
        for history in self._histories.values():
            history.started, history.oldest = False, 0

    def _far_bytes(self) -> tuple[int, int]:
        """What waits in host memory, and what is locked besides."""
        self._place()
        size = sum(h.far_bytes for h in self._histories.values())
        return size, min(SPARE_BYTES, size // SPARE_SHARE) if self.parking.near else 0

    def _place(self) -> None:
        if not self._placed:
            keep_near(self._histories.values(), self.parking.near)
            self._placed = True

    # -- between passes --------------------------------------------------------------------------------------------

    @property
    def holding(self) -> list[str]:
        """Keys of all convolutions whose history waits here."""
        return list(self._histories)

    def frame(self, key: str) -> Plane:
        """The shape of a frame of its history."""
        return self._histories[key].plane

    def history(self, key: str) -> list[Piece]:
        """The last frames that `key` keeps, in order. Empty before its clip's first pass."""
        history = self._histories[key]
        if not history.started:
            return []
        self.wait()
        return list(history.pieces())

    def adopt(self, key: str, frames: Tensor) -> None:
        """`key` goes on behind these frames [frames, H + 2, W + 2, C], oldest first."""
        history = self._histories[key]
        self.wait()
        for segment in history.segments:
            segment.data.copy_(frames[:, segment.first : segment.last])
        history.started, history.oldest = True, 0
        if self._aside:
            history.stored = torch.cuda.current_stream(self.device).record_event()

    # -- one use ---------------------------------------------------------------------------------------------------

    def enter(self, key: str, band: Band, frames: int) -> Buffer:
        """A buffer whose view takes new frames behind the history, which may still be under way (`arrive`). Until it
        is left, one more use may be entered."""
        if self.coming and self.coming[0] == (key, band):
            self.coming.popleft()
        else:  # not announced: nothing can be fetched ahead
            self.coming.clear()
        turn, count = self._turn, len(self._buffers)
        self._turn = (turn + 1) % count
        buffer = self._buffers[turn]
        if self._aside and buffer.stored is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.stored)
        if buffer.holds != (key, band):
            self._fetch(buffer, key, band)
        buffer.view = _view(buffer, self._histories[key], band, frames)
        seen = {key}
        for ahead, use in zip(range(1, count), self.coming, strict=False):
            following = self._buffers[(turn + ahead) % count]
            # The same convolution's next pass reads what this one is about to store.
            if following.view is not None or (use[0] in seen and use[1].first == 0):
                break
            seen.add(use[0])
            if following.holds != use and not self._histories[use[0]].segment(use[1]).near:
                self._fetch(following, *use)
        return buffer

    def arrive(self, buffer: Buffer, head: str) -> None:
        """New frames are in the view; from now on the history is, too. What the next pass needs of it is stored while
        the convolution runs."""
        (key, band), data = buffer.holds, buffer.view
        history = self._histories[key]
        if not history.started:
            fill_head(data, list(range(history.frames + 1)), head)
        elif buffer.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.arrived)
        count, first = history.fresh(data.shape[0])
        segment = history.segment(band)
        last = band.bottom if band.bottom == segment.last else band.stored
        aside = self._aside and not segment.near
        if aside:
            self._out.wait_event(torch.cuda.current_stream(self.device).record_event())
        with _on(self._out if aside else None):
            for i, frame in enumerate(data[data.shape[0] - count :]):
                target = segment.part((first + i) % history.frames, band.top, last)
                target.copy_(frame[: last - band.top], non_blocking=aside)
        if aside:
            buffer.stored = self._out.record_event()

    def leave(self, buffer: Buffer) -> None:
        """The convolution has read the view."""
        (key, band), data = buffer.holds, buffer.view
        history = self._histories[key]
        buffer.holds = buffer.view = None
        if self._aside:
            buffer.read = torch.cuda.current_stream(self.device).record_event()
        if band is history.bands[-1]:
            count, first = history.fresh(data.shape[0])
            history.oldest = (first + count) % history.frames
            history.started = True
            if self._aside:
                history.stored = self._out.record_event()

    def _fetch(self, buffer: Buffer, key: str, band: Band) -> None:
        history = self._histories[key]
        buffer.holds = (key, band)
        buffer.arrived = None
        if not history.started:
            return
        segment = history.segment(band)
        aside = self._aside and not segment.near
        if aside:
            for event in (buffer.stored, buffer.read, history.stored):
                if event is not None:
                    self._in.wait_event(event)
        with _on(self._in if aside else None):
            for i, frame in enumerate(_view(buffer, history, band, 0)):
                source = segment.part((history.oldest + i) % history.frames, band.top, band.bottom)
                frame.copy_(source, non_blocking=aside)
        if aside:
            buffer.arrived = self._in.record_event()


def _view(buffer: Buffer, history: History, band: Band, frames: int) -> Tensor:
    size = _bytes(history, band, frames)
    shape = (history.frames + frames, band.bottom - band.top, *history.plane[1:])
    return buffer.data[:size].view(history.dtype).view(shape)


def _bytes(history: History, band: Band, frames: int) -> int:
    rows = (band.bottom - band.top) * history.plane[1] * history.plane[2]
    return (history.frames + frames) * rows * history.dtype.itemsize


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
