"""A whole clip's way through rows of stations, one row after the other: between them its frames wait in host memory,
so that each row has the GPU's memory to itself. No frame is computed twice or in another form, so the bits are those of
one row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...runtime.pinned import staging
from ...system.devices import empty_device_cache, uploaded
from .neighbours import Frames, Station, along

#: Groups of frames by which the host may be ahead of a GPU that reads them: these are on the GPU in addition.
AHEAD = 2


class Waiting:
    """Groups of a clip's frames, in order, in page-locked host memory where their device is a GPU."""

    def __init__(self) -> None:
        self._groups: deque[tuple[Frames, torch.device]] = deque()
        self._begun: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def settle(self) -> None:
        """Wait until all groups are in host memory, and free the GPU memory that made them."""
        device = self._groups[0][1]
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
            empty_device_cache()

    def put(self, frames: Frames) -> None:
        """Store the next group, without its context."""
        noisy = None if frames.noisy is None else _parked(frames.noisy)
        kept = replace(frames, tokens=_parked(frames.tokens), context=None, noisy=noisy)
        self._groups.append((kept, frames.tokens.device))

    def take(self, keep: bool = False) -> Frames:
        """Return the first group. keep: store it as the last one again."""
        frames, device = self._groups.popleft()
        if keep:
            self._groups.append((frames, device))
        if device.type == "cpu":
            return frames
        if device.type == "cuda":
            self._begun.append(torch.cuda.current_stream(device).record_event())
        if len(self._begun) > AHEAD:
            self._begun.popleft().synchronize()
        noisy = None if frames.noisy is None else uploaded(frames.noisy, device)
        return replace(frames, tokens=uploaded(frames.tokens, device), noisy=noisy)


class Joined:
    """Replace frames by their context and the tokens that wait for it."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def push(self, frames: Frames) -> Iterator[Frames]:
        yield replace(self._waiting.take(), ends=frames.ends, context=frames.tokens)


#: Returns the stations of a later pass, given the frames that the pass before has left.
Row = Callable[[Waiting], Sequence[Station]]


class Passes:
    """All stations of a clip's way.

    A clip passes `first` while its frames come. Where there are `later` rows, it then passes these, each with the
    results of `first`, which no station may change; the last row has the results of the whole."""

    def __init__(self, first: Sequence[Station], later: Sequence[Row], check: Callable[[], None]) -> None:
        """check: called for each group of frames in later rows; may raise."""
        self._first, self._later, self._check = first, later, check
        self._features = Waiting()

    def push(self, frames: Frames) -> Iterator[Frames]:
        if not self._later:
            yield from along(self._first, frames)
            return
        for group in along(self._first, frames):
            self._features.put(group)
        if frames.ends:
            self._first = ()
            yield from self._rest()

    def _rest(self) -> Iterator[Frames]:
        left = Waiting()
        for number, row in enumerate(self._later, 1):
            self._features.settle()
            stations, made, last = row(left), Waiting(), number == len(self._later)
            for _ in range(len(self._features)):
                self._check()
                for group in along(stations, self._features.take(keep=not last)):
                    if last:
                        yield group
                    else:
                        made.put(group)
            left = made


def _parked(x: Tensor) -> Tensor:
    """Return a copy in host memory, which is complete when the current stream is; x itself where it is there."""
    if x.device.type == "cpu":
        return x
    there = staging(tuple(x.shape), x.dtype)
    there = torch.empty(x.shape, dtype=x.dtype, device="cpu") if there is None else there
    return there.copy_(x, non_blocking=True)
