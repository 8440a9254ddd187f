"""What the kernels of conv3d get by position, in their order, and the constants of the epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..operators import strides_of
from .types import Epilogue, Partials, Pixels, Weight


class Arguments(NamedTuple):
    """All that follows a kernel's operands. The three kernels name them in this order (a test compares), and their
    launch passes them by name.

    res, bias, scale, partials, health: `out` where there is none. act_scale: of the activation. gain to high: as of
    `Pixels`. The rest are numbers that no kernel is compiled anew for. in_frame, in_pitch: the input's positions of a
    frame and of a row. origin: of the first output's window in a frame. pitch: positions of a row of tiles. row_block:
    rows whose positions share tiles. block_tiles, frame_tiles, tiles: tiles of such a block, of a frame and of all.
    first: of the input's frames within its clip. drop: frames that the first one lacks. first_row, last_row: of a band
    and of its frame. Strides are in units of UNIT elements.
    """

    out: Tensor
    res: Tensor
    bias: Tensor
    scale: Tensor
    partials: Tensor
    health: Tensor
    act_scale: float
    gain: float
    offset: float
    low: float
    high: float
    slots: int
    start: int
    in_frame: int
    in_pitch: int
    origin: int
    height: int
    width: int
    pitch: int
    row_block: int
    block_tiles: int
    frame_tiles: int
    tiles: int
    first: int
    drop: int
    first_row: int
    last_row: int
    out_t: int
    out_y: int
    out_x: int
    res_t: int
    res_y: int
    res_x: int


#: Those of them that no kernel is compiled anew for.
NUMBERS = list(Arguments._fields[Arguments._fields.index("slots") :])
_STRIDES = Arguments._fields[-6:]
_AS_IT_IS = Pixels(1.0, 0.0, 0.0, 0.0)


def finish(
    x: Tensor, weight: Weight, out: Tensor, epilogue: Epilogue, partials: Partials | None
) -> tuple[tuple[Any, ...], dict[str, int], dict[str, Any]]:
    """Return the first fields of `Arguments`, up to `high`; its strides by name; and the epilogue's constants."""
    scale, bias, residual, fmt = weight.scale, epilogue.bias, epilogue.residual, epilogue.format(out.dtype)
    form = fmt or _AS_IT_IS
    if scale is None and epilogue.scale != 1.0:
        scale = x.new_ones(weight.data.shape[0], dtype=torch.float32)
    health = None if fmt is None else epilogue.health
    unit, strides = strides_of(out) if residual is None else strides_of(out, residual)
    head = (
        out, out if residual is None else residual, out if bias is None else bias, out if scale is None else scale,
        out if partials is None else partials.data, out if health is None else health, epilogue.scale, form.gain,
        form.offset, form.low, form.high,
    )  # fmt: skip
    return head, dict(zip(_STRIDES, (*strides, 0, 0, 0), strict=False)), {
        "BIAS": "none" if bias is None else "border" if bias.dim() == 3 else "plain", "SCALED": scale is not None,
        "RESIDUAL": residual is not None, "SPAN": 0 if partials is None else partials.span, "CLAMP": fmt is not None,
        "ROUND": not out.dtype.is_floating_point, "HEALTH": health is not None, "UNIT": unit,
    }  # fmt: skip
