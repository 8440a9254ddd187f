"""Limit of the GPU memory that torch reserves while plain torch runs, so that no run takes more than its plan states.

torch's caching allocator keeps freed memory in the blocks that it was cut into. What a run reserves so depends on what
ran before, and on where the driver places memory. Under a limit torch frees its unused blocks before it reserves more,
and raises OutOfMemoryError only where that is not enough."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import log
from ..system.devices import empty_device_cache, numbered


def _fraction(device: torch.device) -> float:
    """Return torch's limit as a part of the card, 1 for none; torch 2.6 and 2.7 do not tell it, so it is 1 there."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    return min(read(device), 1.0)  # other allocators than torch's own return huge numbers


class Allowance:
    """Bytes that one run may reserve on its device in addition to what others have reserved when it starts.

    Enter it for the run, and `step` for each part of the run between which the caller works: memory that the caller
    takes then comes on top. Runs of several threads on one device share the sum of their allowances, so each finds what
    its plan states. Work of other threads that are no runs counts as this run's, and meets a full card when that is
    used up."""

    def __init__(self, device: torch.device, nbytes: int, held: int = 0, limits: bool = True) -> None:
        """Prepare the allowance of a run.

        Args:
            device: where it runs; nothing is limited on a CPU.
            nbytes: that its plan states.
            held: part of them that is reserved already.
            limits: torch keeps to the limit; False: the bytes only come on top of other runs' limits.
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
                self.base = torch.cuda.memory_reserved(self._device) - self._held
                self._failed = _failures(self._device)
            _LIMITS[self._device].change(self, runs=True)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._device is None:
            return
        _LIMITS[self._device].change(self, runs=False)
        if self.limits and kind is None and _failures(self._device) > self._failed:
            log.once("cuDNN found no memory for some algorithms within the plan and took others, perhaps slower ones: "
                     "raise vram_gb")  # fmt: skip

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep to the limit inside."""
        if self._device is None or not self.limits:
            yield
            return
        if self._left >= 0:
            self.base += max(torch.cuda.memory_allocated(self._device) - self._left, 0)
        limit = _LIMITS[self._device]
        limit.change(self, inside=True)
        try:
            yield
        finally:
            limit.change(self, inside=False)
            self._left = torch.cuda.memory_allocated(self._device)


def _failures(device: torch.device) -> int:
    """Return how many requests torch could not meet. cuDNN goes on without an algorithm that finds no memory."""
    return torch.cuda.memory_stats(device).get("num_ooms", 0)


class _Limit:
    """Limit of one device for all runs on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: list[Allowance] = []
        #: torch's limit without runs, as a part of the card, while it is replaced.
        self._before: float | None = None

    def change(self, run: Allowance, runs: bool = True, inside: bool = False) -> None:
        """Note that an allowance is in force or not, and inside a step or not; set torch's limit to the sum of all."""
        with self._lock:
            run.inside = inside
            self._runs = [each for each in self._runs if each is not run] + [run] * runs
            if any(each.inside for each in self._runs):
                if self._before is None:
                    self._before = _fraction(run._device)
                total = torch.cuda.mem_get_info(run._device)[1]
                most = max(each.base for each in self._runs) + sum(each.nbytes for each in self._runs)
                torch.cuda.set_per_process_memory_fraction(min(most / total, self._before), run._device)
            elif self._before is not None:
                torch.cuda.set_per_process_memory_fraction(self._before, run._device)
                self._before = None


#: By device.
_LIMITS: defaultdict[torch.device, _Limit] = defaultdict(_Limit)
