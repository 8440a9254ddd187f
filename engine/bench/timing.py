"""Timing on a CUDA device, and the ceilings that all figures are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

WARM_UP = 3
SECONDS = 0.15  # duration of the repetitions of a measurement, at least MIN_RUNS of them
MIN_RUNS = 7
SIDE = 8192  # rows and columns of the matrices


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
    """Rates of the vendor's own routines on this GPU, now: products in TFLOP/s (None: it has none), copy in TB/s."""

    fp16: float
    bf16: float
    fp8_fast: float | None
    fp8_exact: float | None
    int8: float | None
    copy: float

    def line(self) -> str:
        """Format the figures in one line."""
        fp8 = "" if self.fp8_fast is None else f", fp8 {self.fp8_fast:.0f} fast / {self.fp8_exact:.0f} exact"
        matrix = f"fp16 {self.fp16:.0f}, bf16 {self.bf16:.0f}{fp8}, int8 {self.int8:.0f} TFLOP/s"
        return f"{matrix}; copy {self.copy:.2f} TB/s"


def matrix_rate(device: torch.device, dtype: torch.dtype, fast: bool = True) -> float | None:
    """Return the TFLOP/s of a SIDE^3 product of random data; None for fp8 on a GPU without it.

    Args:
        device: a CUDA device.
        dtype: of the operands. cuBLAS computes the product, or `_scaled_mm` for fp8.
        fast: use fp8's fast accumulation.
    """
    if dtype == torch.int8:
        a, b = (torch.randint(-60, 60, (SIDE, SIDE), dtype=dtype, device=device) for _ in range(2))
        call = partial(torch._int_mm, a, b.T)
    else:
        a, b = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
        call = partial(torch.mm, a, b.T)
    if dtype == torch.float8_e4m3fn:
        if torch.cuda.get_device_capability(device) < (8, 9):
            return None
        one = torch.ones((), device=device)
        call = partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.float16, use_fast_accum=fast)
    return 2 * SIDE**3 * 1e-9 / measure(call).median


def copy_rate(device: torch.device) -> float:
    """Return the TB/s of a copy of 2 GiB within the device, bytes read + written."""
    source = torch.randint(0, 100, (2**30,), dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes * 1e-9 / measure(lambda: target.copy_(source)).median


def ceilings(device: torch.device) -> Ceilings:
    """Measure all ceilings."""
    fp8 = torch.float8_e4m3fn
    return Ceilings(matrix_rate(device, torch.float16), matrix_rate(device, torch.bfloat16), matrix_rate(device, fp8),
                    matrix_rate(device, fp8, fast=False), matrix_rate(device, torch.int8), copy_rate(device))
