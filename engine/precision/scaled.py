"""Check if torch has 8-bit products with row scales on a device, which transformers need."""

from __future__ import annotations

import functools

import torch

from ..kernels.targets import FP8
from .modes import Mode

#: Side of the matrices of the product that is tried.
SIZE = 64


def scaled_mode(mode: Mode, device: torch.device, min_db: float, plain: str) -> Mode:
    """Return the mode for a transformer: without 8 bit where the device lacks it or a floor is asked for.

    A floor in dB is not measured on a transformer's products.

    Args:
        mode: as `modes.resolve` returns it.
        device: where the model runs.
        min_db: floor in dB (0: none).
        plain: name of the type that runs without 8 bit.
    """
    if mode.half_accumulate:
        return Mode(refused=f"fp16_fast is not to be had (its products sum in fp32): {plain} runs instead")
    if mode.kind is None:
        return mode
    why = f"min_db={min_db:g} is not measured on its products" if min_db else why_not(mode.kind, device)
    return mode if why is None else Mode(refused=f"{mode.kind} is not to be had ({why}): {plain} runs instead")


@functools.cache
def why_not(kind: str, device: torch.device) -> str | None:
    """Return the reason that torch lacks such products on a device, or None. On a CPU their numbers are emulated."""
    if device.type == "cpu":
        return None
    ones = torch.ones(SIZE, SIZE, device=device)
    try:
        if kind == "int8":
            sums = torch.empty(SIZE, SIZE, dtype=torch.int32, device=device)
            torch._int_mm(ones.to(torch.int8), ones.to(torch.int8).t(), out=sums)
        else:
            eight, scale, bias = ones.to(FP8), ones[:, :1].contiguous(), ones[0].bfloat16()
            torch._scaled_mm(eight, eight.t(), scale, scale.t(), bias=bias, out_dtype=torch.bfloat16,
                             use_fast_accum=True, out=torch.empty_like(ones, dtype=torch.bfloat16))  # fmt: skip
    except (RuntimeError, ValueError, AttributeError) as error:
        return f"torch {torch.__version__} has no such products here: {str(error).splitlines()[0]}"
    return None
