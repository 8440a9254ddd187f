"""Causal history of a fused run that stays on the device: rings of frames, shared by convolutions of one shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .arena import ALIGN

#: Bordered rows, bordered columns and channels of a convolution's input.
Plane = tuple[int, int, int]


@dataclass(frozen=True)
class Piece:
    """Bordered rows [first, first + len(rows)) of one frame of a history, in their place: [rows, W + 2, C].

    Frame 0 is the oldest one."""

    frame: int
    first: int
    rows: Tensor


class Ring:
    """Bordered frames [slots, H + 2, W + 2, C], shared by all convolutions of one shape.

    Each convolution owns its history, the last frames it has read. `frames` more slots are free and lie after the
    history of the convolution whose turn it is: it writes its new frames there and reads on from its history. The slots
    that it no longer needs become free before its new history, where the next one's history ends: they lie in running
    order. So n convolutions need n histories and `frames` slots, nothing is ever copied, and after a pass the free
    slots are back where the first one needs them. Only the last one may take the pass's frames in several calls."""

    def __init__(self, plane: Plane, dtype: torch.dtype) -> None:
        self.plane = plane
        self.dtype = dtype
        self.frames = 0
        self.histories: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._fed: dict[str, int] = {}
        self._started: set[str] = set()
        self._position = 0
        self.data: Tensor | None = None

    @property
    def slots(self) -> int:
        return sum(self.histories.values()) + self.frames

    @property
    def nbytes(self) -> int:
        return self.slots * math.prod(self.plane) * self.dtype.itemsize

    def join(self, key: str, history: int, frames: int) -> None:
        """Reserve, in a dry run, `history` slots for `key` and `frames` new ones.

        It comes after all convolutions that joined before."""
        if self.data is not None:  # the same steps run dry ahead of their turn: the memory is settled
            return
        if key not in self.histories:
            self.histories[key] = history
            self._ends[key] = sum(self.histories.values())
        self._fed[key] = self._fed.get(key, 0) + frames
        self.frames = max(self.frames, self._fed[key])

    def allocate(self, device: torch.device, within: Tensor | None = None) -> Tensor | None:
        """Allocate the memory, or take it from the bytes `within` and return the rest of them.

        Its contents are unknown, so the clip starts anew."""
        self.restart()
        if within is None:
            self.data = torch.empty((self.slots, *self.plane), dtype=self.dtype, device=device)
            return None
        self.data = within[: self.nbytes].view(self.dtype).view(self.slots, *self.plane)
        return within[-(-self.nbytes // ALIGN) * ALIGN :]

    def place(self, key: str, frames: int, late: bool = False) -> tuple[int, int]:
        """Return (slot of the oldest frame of its history, slot for the first of its `frames` new ones).

        late: a clip's first frames may be fewer than others got before it in this pass; they are the last of as many.
        """
        fed = self._fed.get(key, 0)
        self._fed[key] = fed + frames
        ahead = max(self._fed.values()) - fed - frames if late and key not in self._started else 0
        start = (self._position + fed + ahead - self._ends[key]) % self.slots
        return start, (start + self.histories[key]) % self.slots

    def begin(self, key: str, head: str, start: int | None = None) -> None:
        """Fill a history, once at a clip's start, with the input before a clip; its first new frames are in place.

        Args:
            key: the convolution.
            head: as in `fill_head`.
            start: slot at which the history begins; None for the first call of a pass.
        """
        if key in self._started:
            return
        self._started.add(key)
        if start is None:
            start = (self._position - self._ends[key]) % self.slots
        slots = [(start + i) % self.slots for i in range(self.histories[key] + 1)]
        fill_head(self.data, slots, head)

    def advance(self, moved: bool = True) -> None:
        """End the pass: all convolutions have read their new frames, the same number each.

        moved: false in a dry run, where they have only stated the number."""
        frames = max(self._fed.values(), default=0)
        self._fed.clear()
        if moved:
            self._position = (self._position + frames) % self.slots

    def history(self, key: str) -> list[Piece]:
        """Return, between passes, the last frames that `key` keeps, in order. Empty before its clip's first pass."""
        if key not in self._started:
            return []
        first = self._position - self._ends[key]
        return [Piece(i, 0, self.data[(first + i) % self.slots]) for i in range(self.histories[key])]

    def adopt(self, key: str, frames: Tensor) -> None:
        """Continue `key`, between passes, after these frames [frames, H + 2, W + 2, C], oldest first."""
        self._started.add(key)
        for slot, frame in zip(self.history(key), frames, strict=True):
            slot.rows.copy_(frame)

    def forget(self, key: str) -> None:
        """Let the next call of `key` begin its history anew."""
        self._started.discard(key)

    def rewind(self) -> None:
        """Move the histories, between passes, to where a clip's first pass looks for them, which begins at slot 0.

        Launches that follow get the same slots every time."""
        live = sum(self.histories.values())
        while self._position:
            # The free slots lie after the newest frame and so, around the ring, before the oldest: room for a hop.
            hop = min(self._position, self.frames)
            oldest = self._position - live
            for first in range(0, live, hop):
                self._move(oldest + first, oldest + first - hop, min(hop, live - first))
            self._position -= hop

    def _move(self, source: int, target: int, count: int) -> None:
        while count:
            source, target = source % self.slots, target % self.slots
            part = min(count, self.slots - source, self.slots - target)
            self.data[target : target + part].copy_(self.data[source : source + part])
            source, target, count = source + part, target + part, count - part

    @property
    def mark(self) -> tuple[int, frozenset[str]]:
        """Return, between passes, the slot where the next pass begins, and the convolutions that have a history."""
        return self._position, frozenset(self._started)

    @mark.setter
    def mark(self, mark: tuple[int, frozenset[str]]) -> None:
        self._position, self._started = mark[0], set(mark[1])
        self._fed.clear()

    def restart(self) -> None:
        """Forget the clip."""
        self.mark = 0, frozenset()


def fill_head(data: Tensor, slots: list[int], head: str) -> None:
    """Fill all `slots` but the last with a causal convolution's input before a clip.

    Args:
        data: [slots, H + 2, W + 2, C].
        slots: those of a history, and then that of the clip's first frame.
        head: "replicate" for copies of that frame, or "zero" for zeros.
    """
    for slot in slots[:-1]:
        if head == "zero":
            data[slot].zero_()
        else:
            data[slot].copy_(data[slots[-1]])
