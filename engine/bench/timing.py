"""Timing on a CUDA device, and the ceilings every figure is compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

WARM_UP = 3
SECONDS = 0.15  # of repetitions per measurement, at least MIN_RUNS of them
MIN_RUNS = 7


@dataclass(frozen=True)
class Time:
    """Milliseconds over `runs` repetitions."""

    median: float
    low: float
    high: float
    runs: int


def measure(call: Callable[[], object], seconds: float = SECONDS) -> Time:
    """Time one call by CUDA events, each repetition on its own; the first calls are not counted."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    probe = _timed(call, 1)[0]
    times = _timed(call, max(MIN_RUNS, min(200, int(seconds * 1e3 / max(probe, 1e-3)))))
    return Time(statistics.median(times), min(times), max(times), len(times))


def _timed(call: Callable[[], object], runs: int) -> list[float]:
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


@dataclass(frozen=True)
class Ceilings:
    """Rates of the vendor's own routines on this GPU, now: matrix products in TFLOP/s, copy in TB/s."""

    fp16: float
    bf16: float
    fp8_fast: float | None
    fp8_exact: float | None
    copy: float

    def matrix(self, dtype: torch.dtype) -> float | None:
        if dtype == torch.float8_e4m3fn:
            return self.fp8_fast
        return {torch.float16: self.fp16, torch.bfloat16: self.bf16}.get(dtype)


def ceilings(device: torch.device, size: int = 8192) -> Ceilings:
    """8192^3 products of random data, and a copy of 2 GiB (bytes read + written)."""
    flops = 2 * size**3 * 1e-9
    rates = {}
    for dtype in (torch.float16, torch.bfloat16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates[dtype] = flops / measure(lambda a=a, b=b, out=out: torch.mm(a, b.T, out=out)).median
    fast = exact = None
    if torch.cuda.get_device_capability(device) >= (8, 9):
        a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)

        def product(fast: bool) -> float:
            call = partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.float16, use_fast_accum=fast)
            return flops / measure(call).median

        fast, exact = product(True), product(False)
    source = torch.randint(0, 100, (2**30,), dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes * 1e-9 / measure(lambda: target.copy_(source)).median
    return Ceilings(rates[torch.float16], rates[torch.bfloat16], fast, exact, copy)
