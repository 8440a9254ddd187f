"""Rows of the operators' table, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.targets import FP8
from .calls import Spread
from .timing import measure


@dataclass(frozen=True)
class Row:
    """One measurement. rate is in TFLOP/s (unit "F") or TB/s ("B"), and so is the ceiling measured with its case."""

    operator: str
    shape: str
    dtype: str
    who: str
    time: Spread
    rate: float
    unit: str
    ceiling: float | None

    def record(self) -> dict[str, Any]:
        return {**vars(self), "time": vars(self.time)}

    def line(self) -> str:
        share = "" if self.ceiling is None else f"{100 * self.rate / self.ceiling:5.1f} % of {self.ceiling:.4g}"
        unit = "TFLOP/s" if self.unit == "F" else "TB/s"
        spread = f"({self.time.low:.3f}-{self.time.high:.3f})"
        return (f"{self.operator:22} {self.shape:28} {self.dtype:9} {self.who:26} {self.time.median:9.3f} {spread:>19} "
                f"{self.rate:8.2f} {unit:7} {share}")


HEADER = (f"{'operator':22} {'shape':28} {'type':9} {'by':26} {'median ms':>9} {'(min-max)':>19} {'rate':>8}"
          f"{'of ceiling':>18}")


def word(dtype: torch.dtype) -> str:
    """Return the short name of a type."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "fp8", torch.int8: "int8"}.get(dtype, str(dtype)[6:])


class Meter:
    """Times calls on one device; `ceiling` is that of the current case, in TFLOP/s or TB/s."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ceiling: float | None = None

    def flops(self, operator: str, shape: str, dtype: torch.dtype, who: str, work: float,
              call: Callable[[], object]) -> Row:
        """Time a call whose rate counts in TFLOP/s. work: its FLOP."""
        time = measure(call, self.device)
        return Row(operator, shape, word(dtype), who, time, work * 1e-9 / time.median, "F", self.ceiling)

    def bytes(self, operator: str, shape: str, dtype: torch.dtype, who: str, moved: float,
              call: Callable[[], object]) -> Row:
        """Time a call whose rate counts in TB/s. moved: bytes read and written."""
        time = measure(call, self.device)
        return Row(operator, shape, word(dtype), who, time, moved * 1e-9 / time.median, "B", self.ceiling)

    def random(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        """Return random values on the device: normal ones, or integers from -60 to 59 for int8."""
        if dtype == torch.int8:
            return torch.randint(-60, 60, shape, dtype=dtype, device=self.device)
        return torch.randn(shape, device=self.device, dtype=torch.float16).to(dtype)
