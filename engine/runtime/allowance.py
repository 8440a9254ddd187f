"""Limit of the GPU memory that torch reserves while plain torch runs, so that no run takes more than its plan states.

torch's caching allocator keeps freed memory in the blocks that it was cut into, so what a run reserves depends on what
ran before. Under a limit torch frees its unused blocks before it reserves more, and raises OutOfMemoryError only where
that is not enough. cuDNN, however, then takes another algorithm, which may round differently: `find_workspace` sees to
it that cuDNN finds its memory, or raises before it is called."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from .. import log
from ..system.devices import allocator, counters, empty_device_cache, numbered

#: Copies up to so many bytes change little, and looking for their memory takes as long as the convolution.
SMALL = 8 << 20
#: `active`: this thread is in a step of a run that keeps to a limit. `reuses`: as `reuses_blocks` says.
_step = threading.local()


def find_workspace(device: torch.device, result: int, copies: int) -> None:
    """Take memory for a convolution and give it back, so that cuDNN finds it in torch's cache, in a run with a limit.

    Dry runs count it so. Without this, the blocks that workspaces leave behind would follow cuDNN's choice of an
    algorithm, and the reserved memory with them: up to 22 % more than a dry run found (H200).

    Args:
        result: bytes of the result.
        copies: bytes of the input, the weight and the result, which cuDNN may lay out anew.
    Raises:
        torch.OutOfMemoryError: there is no room.
    """
    if copies > SMALL and getattr(_step, "active", False):
        blocks = [torch.empty(n, dtype=torch.uint8, device=device) for n in (result, copies)]
        del blocks


def reuses_blocks() -> bool:
    """Check if this thread is in a step of a run that began with the blocks of the run before, which it must not free
    then."""
    return getattr(_step, "reuses", False)


def enforced(device: torch.device) -> bool:
    """Check if torch keeps to a limit on what it reserves on a device; cudaMallocAsync limits what is in use."""
    return allocator(device) in ("native", "expandable")


def _fraction(device: torch.device) -> float:
    """Return torch's limit as a part of the card, 1 for none; torch 2.6 and 2.7 do not tell it, so it is 1 there."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    return min(read(device), 1.0)  # other allocators than torch's own return huge numbers


class Allowance:
    """Bytes that one run may reserve on its device in addition to what others have reserved when it starts.

    Enter it for the run, and `step` for each part of the run between which the caller works: memory that the caller
    takes then comes on top. There is no limit while another run of the process has begun on the device, so that none
    takes another one's memory. Work of other threads that are no runs counts as this run's, and meets a full card when
    that is used up."""

    def __init__(
        self, device: torch.device, nbytes: int, held: int = 0, limits: bool = True, again: Hashable = None
    ) -> None:
        """Prepare the allowance of a run.

        Args:
            device: where it runs; nothing is limited on a CPU.
            nbytes: that its plan states.
            held: part of them that is reserved already.
            limits: torch keeps to the limit; False: the run only lifts other runs' limits.
            again: equal for runs that take the same memory in the same order. Such a run begins with the blocks that
                the last one left, if nothing has taken or freed memory since: freeing 12 GB and taking them again takes
                13 ms. None: it begins without unused blocks.
        """
        self.nbytes, self.limits = nbytes, limits
        self._device = numbered(device) if device.type == "cuda" else None
        self._held, self._left, self._again = held, -1, again
        #: Bytes that others have reserved.
        self.base = self._failed = 0
        self.inside = self._reuses = False

    def __enter__(self) -> Allowance:
        if self._device is not None:
            if self.limits:
                self.base = self._base()
                self._failed = counters(self._device).failures
            _LIMITS[self._device].change(self, runs=True)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._device is None:
            return
        _LIMITS[self._device].change(self, runs=False)
        if not self.limits:
            return
        now = counters(self._device)
        _LEFT[self._device] = self._again, now.allocated, now.reserved, self.base
        if kind is None and now.failures > self._failed:
            # cuDNN goes on without an algorithm that finds no memory.
            log.once("cuDNN found no memory for some algorithms within the plan and took others, perhaps slower ones: "
                     "raise vram_gb")  # fmt: skip

    def _base(self) -> int:
        """Return the bytes that others have reserved; free unused blocks, except those of the same run before."""
        now = counters(self._device)
        *left, base = _LEFT.get(self._device, (None, 0, 0, 0))
        self._reuses = self._again is not None and left == [self._again, now.allocated, now.reserved]
        if self._reuses:
            return base
        empty_device_cache()
        return counters(self._device).reserved - self._held

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep to the limit inside."""
        if self._device is None or not self.limits:
            yield
            return
        if self._left >= 0:
            self.base += max(counters(self._device).allocated - self._left, 0)
        limit = _LIMITS[self._device]
        limit.change(self, inside=True)
        _step.active, _step.reuses = True, self._reuses
        try:
            yield
        finally:
            _step.active = _step.reuses = False
            limit.change(self, inside=False)
            self._left = counters(self._device).allocated


class _Limit:
    """Limit of one device, for the run that is alone on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: list[Allowance] = []
        #: torch's limit without runs, as a part of the card, while it is replaced.
        self._before: float | None = None

    def change(self, run: Allowance, runs: bool = True, inside: bool = False) -> None:
        """Note that a run has begun or ended, and is inside a step or not; set torch's limit."""
        with self._lock:
            run.inside = inside
            self._runs = [each for each in self._runs if each is not run] + [run] * runs
            alone = self._runs[0] if len(self._runs) == 1 else None
            if alone is not None and alone.inside:
                if self._before is None:
                    self._before = _fraction(run._device)
                part = (alone.base + alone.nbytes) / torch.cuda.mem_get_info(run._device)[1]
                torch.cuda.set_per_process_memory_fraction(min(part, self._before), run._device)
            elif self._before is not None:
                torch.cuda.set_per_process_memory_fraction(self._before, run._device)
                self._before = None


#: By device, of the last run: its `again`, the bytes allocated and reserved at its end, and its `base`.
_LEFT: dict[torch.device, tuple[Hashable, int, int, int]] = {}
#: By device.
_LIMITS: defaultdict[torch.device, _Limit] = defaultdict(_Limit)
