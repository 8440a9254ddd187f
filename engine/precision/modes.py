"""Resolve the precision that the user asked for on a device, with a reason where another one runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import torch

from ..kernels.cards import AUTO
from ..kernels.targets import FP8, has_fp8, target
from ..options import why_no_fp8
from ..runtime.pressure import out_of_memory

P = ParamSpec("P")
#: Side of the matrices of the 8-bit product that is tried.
SIZE = 64
#: Name of a precision -> plain float type.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Precisions other than the plain float types. Their activations have the 16-bit type that the model was made for:
#: values of a bf16 model may leave fp16's range.
MIXED = ("fp8", "int8", "fp16_fast")


@dataclass(frozen=True)
class Mode:
    """Precision of a model's products on a device.

    kind: type of 8-bit operands, None: none. half_accumulate: fp16 sums where they are faster. refused: a message why
    the precision that was asked for (`asked`) does not run, and which one runs instead."""

    kind: str | None = None
    half_accumulate: bool = False
    refused: str | None = None
    asked: str = "fp8"

    @property
    def plain(self) -> bool:
        """Check that it has neither 8-bit operands nor fp16 sums."""
        return self.kind is None and not self.half_accumulate


def resolve(asked: str, device: torch.device, min_db: float, kernels_off: str | None, plain: str = "fp16",
            kernels: str = AUTO) -> Mode:  # fmt: skip
    """Return the mode for a precision on a device. A CPU emulates fp8 and int8, for their numbers.

    Args:
        asked: "fp8", "int8", "fp16_fast", "auto" or another precision; "auto" with a floor takes 8 bit on a GPU.
        device: where the model runs.
        min_db: floor in dB (0: none).
        kernels_off: reason that the fused kernels cannot run the model with this precision, or None.
        plain: name of the type of the model's activations, which runs where 8 bit and fp16 sums do not.
        kernels: which kernels are asked for ("auto", "triton", "plain" or a prebuilt set).
    """
    emulated = device.type == "cpu"
    if asked not in MIXED and (asked != "auto" or min_db <= 0 or emulated or kernels_off):
        return Mode()
    if kernels_off:
        return Mode(refused=f"{asked} is unavailable ({kernels_off}): {plain} runs instead")
    here = target(device, kernels)
    if asked == "auto":
        return Mode("fp8" if here.fp8 else "int8")
    if asked == "fp16_fast":
        if plain != "fp16":
            return Mode(refused=f"fp16_fast is for models made for fp16: {plain} runs instead")
        if here.half_accumulate:
            return Mode(half_accumulate=True)
        return Mode(refused=f"fp16 sums are no faster on {here.name}: fp16_fast is {plain} here")
    if asked == "fp8" and not emulated and not here.fp8 and not has_fp8(device, kernels):
        return Mode("int8", refused=f"{why_no_fp8(here)}: int8 runs instead")
    return Mode(asked)


def scaled_mode(mode: Mode, device: torch.device, min_db: float, plain: str, libraries: bool = True) -> Mode:
    """Return the mode for a transformer: without 8 bit where the device lacks it or a floor is asked for.

    A floor in dB is not measured on a transformer's products.

    Args:
        mode: as `modes.resolve` returns it.
        device: where the model runs.
        min_db: floor in dB (0: none).
        plain: name of the type that runs without 8 bit.
        libraries: its products are those of torch's libraries; otherwise kernels of ours.
    """
    if mode.half_accumulate:
        return Mode(refused=f"fp16_fast is unavailable (its products sum in fp32): {plain} runs instead")
    if mode.kind is None:
        return mode
    why = f"min_db={min_db:g} is not measured on its products" if min_db else None
    if why is None and libraries:
        why = why_no_products(mode.kind, device)
    return mode if why is None else Mode(refused=f"{mode.kind} is unavailable ({why}): {plain} runs instead")


def remembered(ask: Callable[P, str | None]) -> Callable[P, str | None]:
    """Ask a question once in a process, and again as long as memory runs out over it: that is no answer, and None is
    returned."""
    known = functools.cache(ask)

    @functools.wraps(ask)
    def answer(*given: P.args, **named: P.kwargs) -> str | None:
        try:
            return known(*given, **named)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return None

    return answer


@remembered
def why_no_products(kind: str, device: torch.device) -> str | None:
    """Return the reason that torch lacks such products on a device, or None. On a CPU their numbers are emulated."""
    if device.type == "cpu":
        return None
    try:
        ones = torch.ones(SIZE, SIZE, dtype=torch.float32, device=device)
        if kind == "int8":
            sums = torch.empty(SIZE, SIZE, dtype=torch.int32, device=device)
            torch._int_mm(ones.to(torch.int8), ones.to(torch.int8).t(), out=sums)
        else:
            eight, scale, bias = ones.to(FP8), ones[:, :1].contiguous(), ones[0].bfloat16()
            torch._scaled_mm(eight, eight.t(), scale, scale.t(), bias=bias, out_dtype=torch.bfloat16,
                             use_fast_accum=True, out=torch.empty_like(ones, dtype=torch.bfloat16))  # fmt: skip
    except (RuntimeError, ValueError, AttributeError) as error:
        if out_of_memory(error):
            raise
        return f"torch {torch.__version__} has no such products here: {str(error).splitlines()[0]}"
    return None
