"""The launch of the Winograd form, with arguments that conv3d has checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...descriptor import Descriptor
from ...launching import launcher
from ...targets import Target
from ..arguments import accumulation, by_phase, finish
from ..schedules import ROW_BLOCK, Schedule
from ..tuned import chosen
from ..types import Epilogue, Geometry, Partials, Weight, stat_span
from .planes import PLANES
from .schedules import pick


def launch(x: Tensor, weight: Weight, out: Tensor, geometry: Geometry, epilogue: Epilogue, start: int, here: Target,
           schedule: Schedule | None = None) -> Partials | None:
    """Run the kernel, as the direct form's `launch` does, on a buffer of planes [slots, 4, H + 2, pairs, C]; phase by
    phase."""
    if weight.phases != (1, 1, 1):
        for part, place, one in by_phase(weight, out, epilogue):
            launch(x, part, place, geometry, one, start, here, schedule)
        return None
    d, h, w = out.shape[:3]
    k, c, pairs = weight.out_channels, weight.channels, x.shape[3]
    rows = geometry.frame_rows or h
    sums = accumulation(x, epilogue, here)
    s = schedule or chosen(x.device, here.way, weight, sums["ACC"], (rows, w), geometry, epilogue.groups)
    s = s or pick(here, x.dtype, c, k, (rows, w), epilogue.groups > 0)
    # In four warps sums in fp16 beside those of them, and residuals that are not as wide as the input, spill.
    shortcut = epilogue.residual is not None and c != k
    if here.mma_sync and s.warps == 4 and s.columns >= 128 and (sums["ACC"] == "f16" or shortcut):
        s = replace(s, warps=8)
    slices = _slices(s, weight, epilogue, sums["ACC"]) if here.mma_sync and not here.tma else s.slices
    if not x.is_meta and out.data_ptr() == x.data_ptr():
        raise ValueError("conv3d in Winograd form cannot overwrite its input")
    # Without sums tiles need not align with bands, and one block for the plane wastes least.
    block = ROW_BLOCK if epilogue.groups else h
    full, rest = divmod(h, block)
    block_tiles = -(-block * pairs // s.positions)
    frame_tiles = full * block_tiles + -(-rest * pairs // s.positions)
    partials = None
    if epilogue.groups:
        span = stat_span(k, epilogue.groups, min(s.columns // slices, s.tail or s.columns))
        shape = (d, frame_tiles, k // span, 2)
        partials = Partials(torch.empty(shape, dtype=torch.float32, device=x.device), span)
    operands: list[Any] = [x, weight.data, weight.data] * 2
    if here.tma:
        blocks = [(n, depth) for depth in (s.depth, s.rest) for n in (s.positions, s.columns, s.tail)]
        operands = [
            Descriptor(t, size) if all(size) else t
            for t, size in zip([x.view(-1, c), weight.data, weight.data] * 2, blocks, strict=True)
        ]
    told = finish(x, weight, out, epilogue, partials)
    mix = out if weight.mix is None else weight.mix
    places = (x.shape[0], start, PLANES * x.shape[2] * pairs, x.shape[2] * pairs, h, w, pairs, block, block_tiles,
              frame_tiles, d * frame_tiles)  # fmt: skip
    constants = dict(
        C=c, K=k, KT=weight.kernel[0], KH=weight.kernel[1], MIX=weight.mix is not None, **told.constants,
        **sums, TMA=here.tma, SLICES=slices, GROUP=s.group,
        BM=s.positions, BN=s.columns, TAIL=s.tail, BK=s.depth, REST=s.rest, num_warps=s.warps, num_stages=s.stages,
    )  # fmt: skip
    launcher("conv3d.winograd_kernel", here)[(d * frame_tiles * -(-k // (s.columns + s.tail)),)](
        *operands, mix, out, *told.tensors, *told.numbers, *places, *told.strides, **constants
    )
    return partials


def _slices(s: Schedule, weight: Weight, epilogue: Epilogue, accumulate: str) -> int:
    """Return the slices of the epilogue: quarters for those kinds of 8-bit layers that spill with halves."""
    tile, deep, c, residual = (s.columns, s.warps), weight.kernel[0], weight.channels, epilogue.residual is not None
    if weight.data.dtype == torch.int8 and not residual and not epilogue.groups:
        spills = (tile == (64, 4) and deep == 3 and c & (c - 1) > 0) or (tile == (128, 8) and (deep, c) == (1, 256))
    else:
        spills = accumulate == "f16" and residual and tile == (64, 4) and (deep, c) == (1, 128)
    return 4 if spills and weight.data.dtype.itemsize == 1 else s.slices
