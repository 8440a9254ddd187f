"""Kernel arguments for the epilogue and the accumulation, shared by the launches of both algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..targets import FP8, Target, interpreted, triton_version
from .types import Epilogue, Partials, Pixels, Weight


@dataclass(frozen=True)
class Finish:
    """Kernel arguments in their order: tensors (`out` stands in for an absent one), numbers, strides, constants."""

    tensors: list[Tensor]
    numbers: list[float]
    strides: list[int]
    constants: dict[str, Any]


def finish(x: Tensor, weight: Weight, out: Tensor, epilogue: Epilogue, partials: Partials | None) -> Finish:
    """Return the epilogue's arguments of one call."""
    residual = epilogue.residual
    views = [out] if residual is None else [out, residual]
    # 16 where every stride is a multiple of 16 elements, so that the compiler may use the widest accesses.
    unit = 16 if all(s % 16 == 0 for t in views for s in t.stride()[:3]) else 1
    strides = [v // unit for v in (*out.stride()[:3], *(residual.stride()[:3] if residual is not None else (0, 0, 0)))]
    scale, bias = weight.scale, epilogue.bias
    if scale is None and epilogue.scale != 1.0:
        scale = x.new_ones(weight.data.shape[0], dtype=torch.float32)
    fmt = epilogue.format(out.dtype)
    form = fmt or Pixels(1.0, 0.0, 0.0, 0.0)
    numbers = [epilogue.scale, form.gain, form.offset, form.low, form.high]
    health = None if fmt is None else epilogue.health
    tensors = [out if t is None else t for t in (residual, bias, scale, partials and partials.data, health)]
    constants = dict(
        BIAS="none" if bias is None else "border" if bias.dim() == 3 else "plain", SCALED=scale is not None,
        RESIDUAL=residual is not None, SPAN=0 if partials is None else partials.span, CLAMP=fmt is not None,
        ROUND=not out.dtype.is_floating_point, HEALTH=health is not None, UNIT=unit,
    )  # fmt: skip
    return Finish(tensors, numbers, strides, constants)


def by_phase(weight: Weight, out: Tensor, epilogue: Epilogue) -> Iterator[tuple[Weight, Tensor, Epilogue]]:
    """Yield the weight, output and epilogue of each phase, for forms that make one at a time."""
    (pt, py, px), k = weight.phases, weight.out_channels
    for number, (iy, ix, it) in enumerate(product(range(py), range(px), range(pt))):
        place = slice(it, None, pt), slice(iy, None, py), slice(ix, None, px)
        bias, residual = epilogue.bias, epilogue.residual
        one = replace(epilogue, bias=None if bias is None else bias[number * k : number * k + k],
                      residual=None if residual is None else residual[place])  # fmt: skip
        yield weight.phase(number), out[place], one


def accumulation(x: Tensor, epilogue: Epilogue, here: Target) -> dict[str, Any]:
    """Return as constants how products are added; Triton's interpreter replaces the forms it cannot run."""
    accumulate = here.accumulate(x.dtype, epilogue.half_accumulate)
    interpret = interpreted() and x.is_cpu
    if interpret and accumulate == "mx" and (triton_version() or (0, 0)) < (3, 9):
        accumulate = "f32"  # dot_scaled crashes in the interpreters before 3.9
    return {"ACC": accumulate, "UPCAST": interpret and x.dtype in (torch.bfloat16, FP8) and accumulate != "mx"}
