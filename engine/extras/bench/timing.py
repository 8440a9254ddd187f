"""Timing of operators on a device, and the ceilings that all figures are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .calls import Spread

WARM_UP = 3
SECONDS = 0.15  # duration of the repetitions of a measurement, at least MIN_RUNS of them
MIN_RUNS = 7
#: Rows and columns of the matrices, and bytes of a copy: on a GPU, on a CPU.
SIDES, COPIED = (8192, 512), (2 << 30, 32 << 20)


def measure(call: Callable[[], object], device: torch.device, seconds: float = SECONDS) -> Spread:
    """Time one call in milliseconds, each repetition on its own; the first calls are not counted."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        probe = _timed(call, WARM_UP + 1, device)[-1]
        return Spread.of(_timed(call, max(MIN_RUNS, min(200, int(seconds * 1e3 / max(probe, 1e-3)))), device))


def _timed(call: Callable[[], object], runs: int, device: torch.device) -> list[float]:
    marks = []
    for _ in range(runs):
        begin = mark(device)
        call()
        marks.append((begin, mark(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [elapsed(begin, end) for begin, end in marks]


def mark(device: torch.device) -> Any:
    """Return a point in time: an event in the current stream of a GPU, a clock's on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(begin: Any, end: Any) -> float:
    """Return the milliseconds between two marks; a GPU must have passed both."""
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


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
    """Return the TFLOP/s of a product of square matrices of random data; None for fp8 on a GPU without it.

    Args:
        device: where it runs.
        dtype: of the operands. torch's own routine computes the product: on a GPU cuBLAS, or `_scaled_mm` for fp8.
        fast: use fp8's fast accumulation.
    """
    side = SIDES[device.type != "cuda"]
    if dtype == torch.int8:
        a, b = (torch.randint(-60, 60, (side, side), dtype=dtype, device=device) for _ in range(2))
        call = partial(torch._int_mm, a, b.T)
    else:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        call = partial(torch.mm, a, b.T)
    if dtype == torch.float8_e4m3fn:
        if torch.cuda.get_device_capability(device) < (8, 9):
            return None
        one = torch.ones((), device=device)
        call = partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.float16, use_fast_accum=fast)
    return 2 * side**3 * 1e-9 / measure(call, device).median


def copy_rate(device: torch.device) -> float:
    """Return the TB/s of a large copy within the device, bytes read + written."""
    source = torch.randint(0, 100, (COPIED[device.type != "cuda"] // 2,), dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes * 1e-9 / measure(lambda: target.copy_(source), device).median


def ceilings(device: torch.device) -> Ceilings:
    """Measure all ceilings of a GPU."""
    fp8 = torch.float8_e4m3fn
    return Ceilings(matrix_rate(device, torch.float16), matrix_rate(device, torch.bfloat16), matrix_rate(device, fp8),
                    matrix_rate(device, fp8, fast=False), matrix_rate(device, torch.int8), copy_rate(device))
