"""Rule for recording a chunk as a CUDA graph: its times on the host and the GPU, against how often it comes.

All times are in milliseconds. Nothing here ever waits for the GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

import torch

T = TypeVar("T")
#: Cost of a recording, in launches of the chunk: it takes the host 1.4 times as long as launching (18 ms against 13 on
#: an H200's host), and then the graph is made and uploaded.
RECORDING = 2.0
#: Number of further calls expected of a plan that comes twice in a row.
CALLS = 10
#: Largest memory in bytes that is kept between two calls (128x128 takes 0.65 GiB, 64x64 0.17), or this part of the card
#: where that is more: 2.2 GB of an H200, which otherwise waits for the host in a Flux picture of 1024x1024 (1.1 GB).
KEPT_BYTES, KEPT_PART = 1 << 30, 1 / 64


class Clock:
    """Measures the GPU's time between two points of the current stream."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def begun(self) -> bool:
        """Check whether the GPU has reached the start."""
        return self._begin.query()

    def milliseconds(self) -> float | None:
        """Return the time, or None while the GPU has not reached the end."""
        return self._begin.elapsed_time(self._end) if self._end.query() else None


@dataclass
class Times:
    """Times of one chunk.

    launching: of the host, for its launches. span: of the GPU, from the first launch to the end of the last. busy: of
    the GPU where none of them waited for the host, as far as that is known."""

    launching: float
    span: float
    busy: float | None = None

    def gain(self, alone: bool = False) -> float:
        """Return the time that a replay saves. alone: the call has no other chunk.

        A GPU that waits for the host ends when the host does. How much of that time it worked is unknown before a
        replay; half of it is assumed. Time that it needs beyond the host's, it worked: while the host launches the next
        chunk, or while the call waits, if there is none. A GPU that is behind at the end of such a call waited less
        before it."""
        if alone:
            return max(self.launching - self.span / 2, 0.0) if self.busy is None else self.span - self.busy
        busy = self.span - self.launching / 2 if self.busy is None else self.busy
        return self.launching - busy


def pays(times: Times | None, left: int, alone: bool = False) -> bool:
    """Check whether a chunk that comes `left` times, this one included, should be recorded. alone: as in `Times`."""
    return times is not None and left * times.gain(alone) > RECORDING * times.launching


def kept_bytes(device: torch.device) -> int:
    """Return the largest memory in bytes that is kept on a device between two calls."""
    if device.type != "cuda":
        return KEPT_BYTES
    return max(KEPT_BYTES, int(KEPT_PART * torch.cuda.get_device_properties(device).total_memory))


@dataclass
class Notes:
    """Observations of the runs of one plan; they hold no memory on the device."""

    #: The kinds of chunks whose kernels are compiled.
    seen: set[Hashable] = field(default_factory=set)
    times: dict[Hashable, Times] = field(default_factory=dict)
    #: Calls since the memory was last freed, and the number of calls after which more are expected.
    calls: int = 0
    patience: int = 1
    #: The reason for which recording failed, if it did.
    failed: str | None = None
    _under_way: tuple[Hashable, float, bool, Clock] | None = None
    #: The kinds that each thread has launched.
    _here: threading.local = field(default_factory=threading.local)

    @property
    def lasting(self) -> bool:
        """Check whether the plan is expected to come again and to find the memory that this call leaves."""
        return self.calls > self.patience

    def launched_here(self, kind: Hashable) -> bool:
        """Check whether this thread has launched such a chunk: cuBLAS and cuDNN keep a handle for each thread, and can
        make none during a recording."""
        return kind in getattr(self._here, "kinds", ())

    def launch(self, kind: Hashable, work: Callable[[], T], clock: Callable[[], Clock]) -> T:
        """Return work(), timed unless its kernels are not compiled yet or the GPU is still at the last timed chunk.

        Args:
            kind: of the chunk.
            work: launches the chunk.
            clock: makes a clock.
        """
        self.settle()
        if kind not in self.seen or self._under_way is not None:
            result = work()
            self._launched(kind)
            return result
        timed, start = clock(), perf_counter()
        timed.start()
        result = work()
        timed.stop()
        launching = 1e3 * (perf_counter() - start)
        self._launched(kind)
        # If the GPU begins only after the last launch, it waits for none, and the host may have waited for the GPU:
        # a few thousand launches fill the queue.
        self._under_way = kind, launching, timed.begun(), timed
        return result

    def _launched(self, kind: Hashable) -> None:
        self.seen.add(kind)
        self._here.kinds = {kind, *getattr(self._here, "kinds", ())}

    def settle(self) -> None:
        """Read the last measured time, if the GPU is done. The quickest launch of a kind counts."""
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
        """Note that the GPU took `busy` for a chunk of this kind without waiting for the host; the least counts."""
        times = self.times.get(kind)
        if times is not None:
            times.busy = busy if times.busy is None else min(busy, times.busy)

    def lose(self) -> None:
        """Note that memory kept for the next call was gone or in the way of another: keep it less readily now."""
        self.calls, self.patience = 0, CALLS * self.patience

    def forget(self) -> None:
        """Start anew after the memory was freed on request."""
        self.calls, self.patience, self.failed = 0, 1, None
