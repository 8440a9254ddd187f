"""Timing of whole calls, and of the memory they take.

This file imports nothing of this package: a peer in another process (tools/comfy_peer.py) loads it too, so that all are
measured by the same code."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GIB = 1 << 30
#: Seconds between two samples of the memory, and the largest number of points kept of a run.
PERIOD = 0.002
POINTS = 240


@dataclass(frozen=True)
class Spread:
    """Median of `runs` values, the smallest and the largest."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float], factor: float = 1.0) -> Spread:
        """Return the spread of values, each times `factor`."""
        ends = statistics.median(values), min(values), max(values)
        return cls(*(factor * value for value in ends), len(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def figures_of(seconds: Sequence[float]) -> dict[str, Any]:
    """Return first_s, median_s, low_s, high_s and runs of calls; only the first one is not steady."""
    steady = Spread.of(seconds[1:])
    return {"first_s": seconds[0], "median_s": steady.median, "low_s": steady.low, "high_s": steady.high,
            "runs": steady.runs}  # fmt: skip


def time_calls(call: Callable[[], Tensor], runs: int, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Time a first call and `runs` more, then make one that is watched but not timed.

    Args:
        call: the operation.
        runs: timed calls after the first one.
        device: device that `call` runs on.

    Returns: (figures, result of the last call). Seconds: `first_s`, `median_s`, `low_s`, `high_s`. GB: `held_gb`
    (allocated before the first call), and the peaks over all calls: `allocated_gb` and `reserved_gb` of torch's
    allocator on a GPU, `process_gb` of the watched call on a CPU (None where unknown). `trace`: [seconds, GB, GB]
    points of the watched call, as in `Watch`.
    """
    settle(device)
    held = torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else None
    times, result = [], None
    for _ in range(runs + 1):
        result = None
        began = time.perf_counter()
        result = call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    result = None
    with Watch(device) as watch:
        result = call()
        synchronize(device)
    figures = {
        **figures_of(times), "held_gb": held, "allocated_gb": None, "reserved_gb": None,
        "process_gb": watch.process_peak, "trace": watch.trace(),
    }  # fmt: skip
    if device.type == "cuda":
        figures["allocated_gb"] = torch.cuda.max_memory_allocated(device) / GIB
        figures["reserved_gb"] = torch.cuda.max_memory_reserved(device) / GIB
    return figures, result


def settle(device: torch.device) -> None:
    """Free what earlier work left, and reset the peaks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Watch:
    """Thread that samples the memory every PERIOD seconds.

    On a GPU a sample is the allocated and reserved GB of torch's allocator; on a CPU it is the resident GB of the
    process, twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._points: list[tuple[float, float, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            now = self._now()
            if now is None:
                return
            self._points.append((time.perf_counter() - self._began, *now))
            if self._done.wait(PERIOD):
                return

    def _now(self) -> tuple[float, float] | None:
        if self._device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
            return allocated / GIB, reserved / GIB
        resident = resident_bytes()
        return None if resident is None else (resident / GIB, resident / GIB)

    @property
    def process_peak(self) -> float | None:
        """Return the largest resident GB that was sampled on a CPU, else None."""
        if self._device.type == "cuda" or not self._points:
            return None
        return max(point[1] for point in self._points)

    def trace(self) -> list[list[float]]:
        """Return at most POINTS points, each the largest of the samples it stands for."""
        step = -(-len(self._points) // POINTS) or 1
        parts = (self._points[i : i + step] for i in range(0, len(self._points), step))
        return [[round(p[0][0], 4), round(max(x[1] for x in p), 4), round(max(x[2] for x in p), 4)] for p in parts]


def in_turns(
    calls: dict[str, Callable[[], Any]], runs: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Time several calls in turns, in reversed order every other turn.

    Args:
        calls: the operations by name.
        runs: turns after the first one.
        device: device that the calls run on.

    Returns: the seconds of each call, the first one included, and the last results, both by name.
    """
    seconds: dict[str, list[float]] = {who: [] for who in calls}
    results: dict[str, Any] = {}
    for turn in range(runs + 1):
        for who in sorted(calls, reverse=turn % 2 == 1):
            results.pop(who, None)
            began = time.perf_counter()
            results[who] = calls[who]()
            synchronize(device)
            seconds[who].append(time.perf_counter() - began)
    return seconds, results


def resident_bytes() -> int | None:
    """Return the bytes that this process holds in RAM; None on systems other than Linux.

    Others do not tell them cheaply."""
    if sys.platform != "linux":
        return None
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
