"""Limit of the GPU memory that torch reserves while plain torch runs, so that no run takes more than its plan states.

torch's caching allocator keeps freed memory in the blocks that it was cut into, so what a run reserves depends on what
ran before. Under a limit torch frees its unused blocks before it reserves more, and raises OutOfMemoryError only where
that is not enough. cuDNN, however, then takes another algorithm, which may round differently: `find_workspace` sees to
it that cuDNN finds its memory, or raises before it is called."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import log
from ..system.devices import allocator, counters, empty_device_cache, numbered

#: Copies up to so many bytes change little, and looking for their memory takes as long as the convolution.
SMALL = 8 << 20
#: `active`: this thread is in a step of a run that keeps to a limit.
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

    def __init__(self, device: torch.device, nbytes: int, held: int = 0, limits: bool = True) -> None:
        """Prepare the allowance of a run.

        Args:
            device: where it runs; nothing is limited on a CPU.
            nbytes: that its plan states.
            held: part of them that is reserved already.
            limits: torch keeps to the limit; False: the run only lifts other runs' limits.
        """
        self.nbytes, self.limits = nbytes, limits
        self._device = numbered(device) if device.type == "cuda" else None
        self._held, self._left = held, -1
        #: Bytes that others have reserved.
        self.base = self._failed = 0
        self.inside = False

    def __enter__(self) -> Allowance:
        if self._device is not None:
            if self.limits:
                empty_device_cache()
                now = counters(self._device)
                self.base, self._failed = now.reserved - self._held, now.failures
            _LIMITS[self._device].change(self, runs=True)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._device is None:
            return
        _LIMITS[self._device].change(self, runs=False)
        if self.limits and kind is None and counters(self._device).failures > self._failed:
            # cuDNN goes on without an algorithm that finds no memory.
            log.once("cuDNN found no memory for some algorithms within the plan and took others, perhaps slower ones: "
                     "raise vram_gb")  # fmt: skip

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
        _step.active = True
        try:
            yield
        finally:
            _step.active = False
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


#: By device.
_LIMITS: defaultdict[torch.device, _Limit] = defaultdict(_Limit)
