"""Causal history that waits outside the rings, and visits the GPU's working memory band by band when its convolution
runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..system.devices import lend_copies, return_copies
from .arena import ALIGN
from .buffers import Buffer, Use
from .history import Band, History, keep_near, split_rows
from .pinned import POOL, copy
from .rings import Piece, Plane, fill_head

#: Extra host memory in bytes that is locked if histories stay on the GPU, at most one part in so many of theirs: the
#: next plan of the same clip may find less GPU memory free (packed weights, a library's workspace) and keep fewer
#: there. Locking 9.3 GB anew took 3.5 s.
SPARE_BYTES, SPARE_SHARE = 256 << 20, 32
#: Most uses whose histories are fetched before their turn: enough for copies to follow each other without gaps.
MOST_AHEAD = 8
#: Smaller uses take one part in so many of the largest use's memory, aligned.
_PARTS = (4, 2, 1)
_WHOLE = _PARTS[0] * ALIGN
#: Bands start at multiples of this many output rows, so that their sums for the next norm are the frame's own.
BAND_ROWS = 32


@dataclass(frozen=True)
class Parking:
    """Choice of the histories that wait outside the rings, by convolution key (None: all), and of their GPU buffers.

    A convolution runs in bands of as many rows (a multiple of 32) as a buffer of `band_bytes` holds, or of `rows`.
    There is room for `buffers` of the largest bands; of those at most half as large, twice as many are in use at once.
    Without `prefetch`, data is copied when it is needed, on the GPU's own queue. At most `near` bytes of the histories
    stay on the GPU, where they need no slots for new frames as a ring does; the others are in host memory. Copies
    within the GPU always are on its own queue: they are kernels, and on another queue they would wait for a convolution
    and hold up the copies after them.

    Pictures have no histories, and bands only. Steps that would have more than `streams` bytes of whole frames at once
    do not keep the values between their convolutions: these are computed again, some rows at a time, for each norm that
    sees the whole frame (engine/runtime/rolling.py)."""

    keys: frozenset[str] | None
    band_bytes: int
    buffers: int = 2
    rows: int = 0
    prefetch: bool = True
    near: int = 0
    streams: int | None = None

    def holds(self, key: str) -> bool:
        return self.keys is None or key in self.keys


class Parked:
    """All parked histories of an ExecutionContext. Uses (a key and a band) come in the order that the dry run noted."""

    def __init__(self, parking: Parking, device: torch.device) -> None:
        self.parking = parking
        self.device = device
        #: Uses still to come: noted in a dry run, consumed by `enter`.
        self.coming: deque[Use] = deque()
        #: The clip ends with them: rows that none of these uses reads need not be stored.
        self.ends = False
        self._histories: dict[str, History] = {}
        #: Bytes of each convolution's largest use, and of the largest of all, in whole parts.
        self._needs: dict[str, int] = {}
        self._largest = 0
        self._placed = False
        self._block: Tensor | None = None
        self._memory: Tensor | None = None
        self._forget()
        self._aside = parking.prefetch and device.type == "cuda"
        self._in: torch.cuda.Stream | None = None
        self._out: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        self._settle()
        return self._room + sum(h.near_bytes(h.near) for h in self._histories.values())

    @property
    def host_bytes(self) -> int:
        return sum(self._far_bytes())

    @property
    def _room(self) -> int:
        return self.parking.buffers * self._largest

    def depth(self, key: str) -> int:
        """Return how many bands of `key` fit at once."""
        return self._room // self._part(self._needs[key]) if key in self._needs else 0

    def moved(self, key: str) -> tuple[int, int, int]:
        """Return how often bands of `key` are used in a chunk, and the bytes that they take from the GPU and the host.
        """
        self._settle()
        if (history := self._histories.get(key)) is None:
            return 0, 0, 0
        times = history.times
        return times * len(history.bands), times * history.near_bytes(history.near), times * history.far_bytes

    def bands(
        self, key: str, plane: Plane, dtype: torch.dtype, kept: int, frames: int, rows: int, step: int, reach: int,
        work: int, times: int = 1, starts: bool = False,
    ) -> Sequence[Band]:  # fmt: skip
        """Return the bands for a convolution's output `rows`, computed `times` times with `work` operations.

        The first call must be for the most frames that it gets at once: it sets the bands' height. starts: of the clip.
        """
        if key not in self._histories:
            line = (kept + frames) * plane[1] * plane[2] * dtype.itemsize
            fit = (self.parking.band_bytes // line - reach) // step + 1
            band = max((self.parking.rows or fit) // BAND_ROWS, 1) * BAND_ROWS
            self._histories[key] = History(plane, kept, dtype, list(split_rows(rows, step, reach, band)))
        history = self._histories[key]
        if self._memory is None:
            history.times += times
            history.work += times * work
            self._placed = False
        elif starts and not history.started:  # few frames, which take the host longer to launch than the GPU to compute
            return history.taller(frames, self._needs[key])
        return history.bands

    def note(self, key: str, band: Band, frames: int) -> None:
        """Announce a use, in a dry run."""
        if self._memory is None:
            size = self._needs[key] = max(self._needs.get(key, 0), self._histories[key].visit_bytes(band, frames))
            self._largest = max(self._largest, -(-size // _WHOLE) * _WHOLE)
        self.coming.append((key, band, frames))

    def allocate(self) -> None:
        if not self._histories:
            return
        if self._aside:
            self._in, self._out = lend_copies(self.device)
        size, spare = self._far_bytes()
        self._block = POOL.take(size, spare) if size else None
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self._memory, near = memory[: self._room], memory[self._room :]
        far = memory[:0] if self._block is None else self._block
        for history in self._histories.values():
            near, far = history.allocate(near, far)
        self._forget()

    def free(self) -> None:
        self.wait()
        if self._block is not None:
            POOL.give(self._block)
        if self._in is not None:
            return_copies(self.device, (self._in, self._out))
        self._block = self._memory = self._in = self._out = None
        self._forget()
        for history in self._histories.values():
            history.stretches = []

    def forget(self, key: str) -> None:
        """Let the next pass of `key` begin its history anew."""
        self._histories[key].forget()

    def wait(self) -> None:
        """Wait until all copies are done."""
        for stream in filter(None, (self._in, self._out)):
            stream.synchronize()

    def restart(self) -> None:
        """Forget the clip."""
        if self._entered:  # the clip was broken off without waiting for its copies
            self.wait()
        self._discard()
        self._left += self._entered
        if self._aside:
            for buffer in self._entered:
                buffer.read = torch.cuda.current_stream(self.device).record_event()
        self._entered.clear()
        self.coming.clear()
        self.ends = False
        for history in self._histories.values():
            history.forget()

    def _forget(self) -> None:
        #: Buffers fetched or to be fetched, in the order of their turns; entered; and left, whose memory still has to
        #: be waited for. The next one lies after `_head`.
        self._ahead: deque[Buffer] = deque()
        self._entered: list[Buffer] = []
        self._left: list[Buffer] = []
        self._head = 0
        self.coming.clear()

    def _far_bytes(self) -> tuple[int, int]:
        """Return the bytes that wait in host memory, and the extra bytes that are locked."""
        self._settle()
        size = sum(h.far_bytes for h in self._histories.values())
        return size, min(SPARE_BYTES, size // SPARE_SHARE) if self.parking.near else 0

    def _settle(self) -> None:
        if not self._placed:
            keep_near(self._histories.values(), self.parking.near)
            self._placed = True

    # -- between passes --------------------------------------------------------------------------------------------

    @property
    def holding(self) -> list[str]:
        """Return the keys of all convolutions whose history waits here."""
        return list(self._histories)

    def history(self, key: str) -> list[Piece]:
        """Return the last frames that `key` keeps, in order. Empty before its clip's first pass."""
        history = self._histories[key]
        if not history.started:
            return []
        self.wait()
        return list(history.pieces())

    def adopt(self, key: str, frames: Tensor) -> None:
        """Continue `key` after these frames [frames, H + 2, W + 2, C], oldest first."""
        history = self._histories[key]
        self.wait()
        for stretch in history.stretches:
            stretch.data.copy_(frames[:, stretch.first : stretch.last])
        history.started, history.same, history.oldest = True, False, 0
        if self._aside:
            history.stored = torch.cuda.current_stream(self.device).record_event()

    # -- one use ---------------------------------------------------------------------------------------------------

    def enter(self, key: str, band: Band, frames: int) -> Buffer:
        """Return a buffer whose view takes new frames after the history; until it is left, one more use may be entered.

        The history may still be in transit: call `arrive`."""
        use = key, band, frames
        if self.coming and self.coming[0] == use:
            self.coming.popleft()
        else:  # not announced: nothing can be fetched ahead, and later reads are unknown
            self.coming.clear()
            self.ends = False
        if self._ahead and self._ahead[0].use != use:
            self._discard()
        buffer = self._ahead.popleft() if self._ahead else self._placed_at(*self._next(use), use)
        self._entered.append(buffer)
        if buffer.free is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.free)
        if not buffer.fetched:
            self._fetch(buffer)
        buffer.view = self._histories[key].view(buffer.data, band, frames)
        self._fetch_ahead()
        return buffer

    def _fetch_ahead(self) -> None:
        """Fetch as many of the coming uses as there is room for."""
        live = [*self._entered, *self._ahead]
        seen = {buffer.use[0] for buffer in live}
        while len(self._ahead) < min(len(self.coming), MOST_AHEAD):
            use = self.coming[len(self._ahead)]
            if not (history := self._histories[use[0]]).started:
                return
            at = self._next(use)
            # The same convolution's next pass reads the frames that this one will store.
            if any(buffer.overlaps(*at) for buffer in live) or (use[0] in seen and use[1].first == 0):
                return
            buffer = self._placed_at(*at, use)
            if not history.stretch(use[1]).near:
                self._fetch(buffer)
            seen.add(use[0])
            live.append(buffer)
            self._ahead.append(buffer)

    # Memory is used cyclically, in power-of-two fractions of the largest use's, each at a multiple of its own size: so
    # two consecutive uses never overlap, whatever their sizes.

    def _part(self, size: int) -> int:
        return next(self._largest // n for n in _PARTS if size <= self._largest // n)

    def _next(self, use: Use) -> tuple[int, int]:
        """Return the place [start, end) of a use, if it were next."""
        size = self._part(self._histories[use[0]].visit_bytes(*use[1:]))
        start = -(-self._head // size) * size
        start = start if start + size <= self._room else 0
        return start, start + size

    def _placed_at(self, start: int, end: int, use: Use) -> Buffer:
        """Return the buffer of a use, for copies into it once earlier uses are done with its memory."""
        self._head = end
        buffer = Buffer(use, start, end, self._memory[start:end])
        # Streams keep their order, so the last use that overlaps stands for all before it.
        last = max((i for i, before in enumerate(self._left) if before.overlaps(start, end)), default=-1)
        done, self._left = self._left[: last + 1], self._left[last + 1 :]
        if self._aside:
            buffer.free = next((b.stored for b in reversed(done) if b.stored is not None), None)
            for event in (buffer.free, done[-1].read if done else None):
                if event is not None:
                    self._in.wait_event(event)
        return buffer

    def _discard(self) -> None:
        """Drop the buffers that were fetched ahead."""
        for buffer in self._ahead:
            for event in (buffer.free, buffer.arrived):
                if event is not None:
                    torch.cuda.current_stream(self.device).wait_event(event)
        self._ahead.clear()
        if self._entered:
            self._head = self._entered[-1].end

    def arrive(self, buffer: Buffer, head: str) -> None:
        """Add the history to a view with its new frames; the next pass's rows are stored while the convolution runs."""
        (key, band, _), data = buffer.use, buffer.view
        history = self._histories[key]
        if not history.started:
            fill_head(data, list(range(history.frames + 1)), head)
            buffer.same = head == "replicate" and data.shape[0] == history.frames + 1
        else:
            if buffer.arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(buffer.arrived)
            for frame in data[1 : history.frames] if history.same else ():
                frame.copy_(data[0])
        if self.ends and not any(use[0] == key and use[1].first == band.first for use in self.coming):
            return
        count, first = history.fresh(data.shape[0])
        frames = data[-1:] if buffer.same else data[data.shape[0] - count :]
        stretches = [(part, history.stretch(part)) for part in band.parts or (band,)]
        far = self._aside and not all(stretch.near for _, stretch in stretches)
        if far:
            self._out.wait_event(torch.cuda.current_stream(self.device).record_event())
        for part, stretch in stretches:
            last = part.bottom if part.bottom == stretch.last else part.stored
            aside = far and not stretch.near
            with _on(self._out if aside else None):
                for i, frame in enumerate(frames):
                    target = stretch.part((first + i) % history.frames, part.top, last)
                    copy(target, frame[part.top - band.top : last - band.top], self._block, aside)
        if far:
            buffer.stored = self._out.record_event()

    def leave(self, buffer: Buffer) -> None:
        """Note that the convolution has read the view."""
        (key, band, _), data = buffer.use, buffer.view
        history = self._histories[key]
        buffer.view = None
        self._entered.remove(buffer)
        self._left.append(buffer)
        if self._aside:
            buffer.read = torch.cuda.current_stream(self.device).record_event()
        if band.last == history.bands[-1].last:
            count, first = history.fresh(data.shape[0])
            history.oldest = (first + count) % history.frames
            history.started, history.same = True, buffer.same
            if self._aside:
                history.stored = self._out.record_event()

    def _fetch(self, buffer: Buffer) -> None:
        key, band, _ = buffer.use
        history = self._histories[key]
        buffer.fetched = True
        if not history.started:
            return
        stretch = history.stretch(band)
        aside = self._aside and not stretch.near
        if aside and history.stored is not None:
            self._in.wait_event(history.stored)
        with _on(self._in if aside else None):
            for i, frame in enumerate(history.view(buffer.data, band, 0)[: 1 if history.same else history.frames]):
                source = stretch.part(history.slot(i), band.top, band.bottom)
                copy(frame, source, self._block, aside)
        if aside:
            buffer.arrived = self._in.record_event()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
