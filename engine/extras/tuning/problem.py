"""A layer's call with tensors of its own: random ones to time and check, or on the meta device to compile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.conv3d import Epilogue, Geometry, Partials, Weight, conv3d
from ...kernels.conv3d.schedules import ROW_BLOCK, Schedule
from ...kernels.conv3d.types import quantise_rows
from ...kernels.targets import Target
from .layers import Layer

#: A call that takes more bytes is timed for fewer frames, then for fewer rows.
MOST_BYTES = 768 << 20
#: Largest ||result - reference|| / ||reference||, by type of operands or result: rounding to them leaves as much.
ERRORS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float8_e4m3fn: 2e-2, torch.int8: 2e-3}
#: Type in which operands are drawn; others in fp16.
_DRAWN = {torch.bfloat16: torch.bfloat16}
#: Largest error where products are summed in fp16, a step at a time.
HALF_ERROR = 8e-3
#: Largest error of the sums that norms are made from.
SUMS_ERROR = 1e-4
#: Rows, columns and frames of a call to check: more than one block and tile, with a partial one at the end.
CHECKED = (ROW_BLOCK + 7, 45, 2)


@dataclass
class Problem:
    """One call. x, out, residual: as for `conv3d`."""

    x: Tensor
    weight: Weight
    out: Tensor
    geometry: Geometry
    epilogue: Epilogue
    start: int

    def launch(self, target: Target, schedule: Schedule) -> Partials | None:
        """Launch the call as in the middle of a clip."""
        return conv3d.launch(target, self.x, self.weight, self.out, **self._how(), schedule=schedule)

    def reference(self, out: Tensor) -> Partials | None:
        return conv3d.reference(self.x, self.weight, out, **self._how())

    def _how(self) -> dict[str, Any]:
        return {"geometry": self.geometry, "epilogue": self.epilogue, "start": self.start}


def sized(layer: Layer) -> Layer:
    """Return the layer with no more frames and rows than MOST_BYTES allow."""
    while _bytes(layer) > MOST_BYTES:
        rows, columns = layer.frame
        if layer.frames > 1:
            layer = replace(layer, frames=layer.frames // 2)
        elif rows > ROW_BLOCK:
            layer = replace(layer, frame=(max(rows // 2 // ROW_BLOCK, 1) * ROW_BLOCK, columns))
        else:
            break
    return layer


def checked(layer: Layer) -> Layer:
    """Return the layer as small as still shows errors of a schedule."""
    rows, columns, frames = CHECKED
    return replace(layer, frame=(rows, columns), frames=frames)


def problem(layer: Layer, device: torch.device, generator: torch.Generator | None = None) -> Problem:
    """Make a layer's call, with seeded values within the range of the operands' type.

    Args:
        layer: size and kind of the call.
        device: the meta device makes tensors without values.
        generator: source of the values; None for torch's own.
    """
    kind, (h, w), (kt, kh, kw) = layer.kind, layer.frame, layer.kernel
    pt, py, px = layer.phases
    sets = math.prod(layer.phases) * max(layer.folded, 1)
    values = _values(device, generator)
    spread = (kt * kh * kw * kind.channels) ** -0.5
    columns = kt * kh * kw * kind.channels
    if device.type == "meta":
        rows = values(sets * kind.outputs, columns).to(kind.dtype)
        scale = values(sets * kind.outputs) if kind.dtype.itemsize == 1 else None
    else:
        rows, scale = quantise_rows(spread * values(sets * kind.outputs, columns), kind.dtype, kind.channels)
    weight = Weight(rows, kind.channels, kind.outputs, layer.kernel, scale, layer.phases, layer.shifted, layer.folded)
    st, sh, sw = layer.stride
    slots = (layer.frames - 1) * st + kt + 1  # a ring of one more, so that it wraps around
    plane = (h * sh + 2, w * sw + 2, kind.channels)
    x = torch.empty(slots, *plane, dtype=kind.dtype, device=device)
    for slot in x if device.type != "meta" else ():  # all slots at once would make copies in wider types
        slot.copy_(_operand(values(*plane, dtype=_DRAWN.get(kind.dtype, torch.float16)), kind.dtype))
    out_type = getattr(torch, layer.out)
    out = torch.empty(layer.frames * pt, h * py, w * px, kind.outputs, dtype=out_type, device=device)
    shape = {0: None, 1: (math.prod(layer.phases) * kind.outputs,), 2: (sets, kind.outputs), 3: (sets, 4, kind.outputs)}
    bias = None if shape[layer.bias] is None else values(*shape[layer.bias])
    residual = values(*out.shape, dtype=out_type) if layer.residual else None
    # 8-bit operands use the whole range of their type; results should not.
    scale_in = 1.0 if kind.dtype.itemsize == 2 else 1.0 / 32
    epilogue = Epilogue(bias, residual, layer.groups, scale_in, half_accumulate=layer.half_accumulate)
    return Problem(x, weight, out, Geometry(layer.stride, layer.origin), epilogue, slots - 1)


def wrong(layer: Layer, target: Target, schedule: Schedule, run: Problem, want: Tensor) -> str | None:
    """Return how a schedule's numbers are wrong, as text; None where they are right.

    Args:
        layer: the layer of `run`.
        target: capabilities of the GPU.
        schedule: the schedule to check.
        run: the call; its `out` is overwritten.
        want: the reference's result, in the result's type.
    """
    run.out.fill_(math.nan)
    sums = run.launch(target, schedule)
    got = run.out
    error = _distance(got.float(), want.float())
    limit = HALF_ERROR if layer.kind.accumulate == "f16" else ERRORS[layer.kind.dtype]
    limit = max(limit, ERRORS.get(got.dtype, 0.0))
    if not error <= limit:
        return f"error {error:.1e} against the reference, where rounding allows {limit:.0e}"
    if sums is not None:
        stored = got.double().reshape(got.shape[0], -1, layer.groups, got.shape[-1] // layer.groups)
        exact = torch.stack((stored.sum((1, 3)), stored.square().sum((1, 3))), -1)
        made = sums.data.double().sum(1).reshape(got.shape[0], layer.groups, -1, 2).sum(2)
        error = _distance(made, exact)
        if not error <= SUMS_ERROR:
            return f"error {error:.1e} of its sums, where rounding allows {SUMS_ERROR:.0e}"
    first = got.clone()
    run.launch(target, schedule)
    return None if torch.equal(first, got) else "other bits the second time"


def _distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def _values(device: torch.device, generator: torch.Generator | None) -> Callable[..., Tensor]:
    if device.type == "meta":
        return lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=device)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, dtype=dtype, device=device, generator=generator)


def _operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * 32).round().clamp_(-127, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)


def _bytes(layer: Layer) -> int:
    kind, (h, w) = layer.kind, layer.frame
    st, sh, sw = layer.stride
    read = ((layer.frames - 1) * st + layer.kernel[0] + 1) * h * sh * w * sw * kind.channels * kind.dtype.itemsize
    made = layer.frames * math.prod(layer.phases) * h * w * kind.outputs * 2 * (1 + layer.residual)
    return read + made
