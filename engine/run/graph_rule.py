"""When recording a chunk as a CUDA graph pays: what the host and the GPU need for it, against how often it comes.

All times are in milliseconds. Nothing here ever waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

import torch

T = TypeVar("T")
#: Recording takes the host 1.4 times as long as launching (18 ms against 13 on an H200's host), and then the graph is
#: made and uploaded.
RECORDING = 2.0
#: A plan that comes twice in a row is taken to come this often again.
CALLS = 10
#: More memory than this is not kept between two calls (128x128 takes 0.65 GiB, 64x64 0.17).
KEPT_BYTES = 1 << 30
#: Of each frame within its clip, launches know only whether it is the first one, the second or a later one.
SETTLED = 2


class Clock:
    """The GPU's time between two points of the current stream."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def begun(self) -> bool:
        """Whether the GPU has come to the start."""
        return self._begin.query()

    def milliseconds(self) -> float | None:
        """None while the GPU has not come to the end."""
        return self._begin.elapsed_time(self._end) if self._end.query() else None


@dataclass
class Times:
    """Of one chunk: the host's for its launches; the GPU's from the first to the end of the last; and the GPU's where
    none of them waited for the host, as far as that is known."""

    launching: float
    span: float
    busy: float | None = None

    @property
    def gain(self) -> float:
        """What a replay saves. A GPU that waits for the host is done as soon as that is; how much of the time it was
        at work nobody knows before a replay: half of it, for want of better. What it is done later, it was at work."""
        busy = self.span - self.launching / 2 if self.busy is None else self.busy
        return self.launching - busy


def pays(times: Times | None, left: int) -> bool:
    """Whether a chunk that comes `left` times, this one included, should be recorded."""
    return times is not None and left * times.gain > RECORDING * times.launching


def chunks_left(clips: int, latents: int, done: int, chunk: int) -> int:
    """How often a chunk of `chunk` latents comes in a call, this one included, at least: `done` of its clip's `latents`
    are behind it, and `clips` more clips follow."""
    return (1 + clips) * (1 if done < SETTLED else (latents - done) // chunk)


@dataclass
class Notes:
    """What the runs of one plan have shown; holds no memory on the device."""

    #: The kinds of chunks whose kernels are compiled.
    seen: set[Hashable] = field(default_factory=set)
    times: dict[Hashable, Times] = field(default_factory=dict)
    #: Calls since the memory was last taken back, and how many it takes until another one is expected.
    calls: int = 0
    patience: int = 1
    #: Why recording failed, if so.
    failed: str | None = None
    _under_way: tuple[Hashable, float, bool, Clock] | None = None

    @property
    def lasting(self) -> bool:
        """Whether the plan is taken to come again and to find what this call leaves."""
        return self.calls > self.patience

    def launch(self, kind: Hashable, work: Callable[[], T], clock: Callable[[], Clock]) -> T:
        """work(), timed unless kernels are still to be compiled or the GPU is behind with the latest one timed."""
        self.settle()
        if kind not in self.seen or self._under_way is not None:
            result = work()
            self.seen.add(kind)
            return result
        timed, start = clock(), perf_counter()
        timed.start()
        result = work()
        timed.stop()
        launching = 1e3 * (perf_counter() - start)
        # Where the GPU begins only after the last launch, it waits for none, and the host may have waited for the GPU:
        # some thousand launches fill the queue.
        self._under_way = kind, launching, timed.begun(), timed
        return result

    def settle(self) -> None:
        """Read the latest time taken, if the GPU is there. The quickest launch of a kind counts."""
        span = self._under_way and self._under_way[3].milliseconds()
        if span is None:
            return
        kind, launching, waited, _ = self._under_way
        self._under_way = None
        known = self.times.get(kind)
        if known is None or launching < known.launching:
            self.times[kind] = Times(launching, span, known and known.busy)
        if not waited:
            self.worked(kind, span)

    def worked(self, kind: Hashable, busy: float) -> None:
        """The GPU did a chunk of this kind in `busy` without waiting for the host; the quickest one counts."""
        times = self.times.get(kind)
        if times is not None:
            times.busy = busy if times.busy is None else min(busy, times.busy)

    def lose(self) -> None:
        """What was kept for the next call was gone, or was in another one's way: not so soon again."""
        self.calls, self.patience = 0, CALLS * self.patience

    def forget(self) -> None:
        """The memory is taken back, as asked for."""
        self.calls, self.patience, self.failed = 0, 1, None
