"""The launch of the Winograd form, with arguments that conv3d has checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...targets import Target
from ..arguments import accumulation, finish
from ..schedules import ROW_BLOCK, Schedule
from ..types import Epilogue, Geometry, Partials, Weight, stat_span
from .planes import PLANES
from .schedules import pick


def launch(x: Tensor, weight: Weight, out: Tensor, geometry: Geometry, epilogue: Epilogue, start: int, first: int,
           here: Target, schedule: Schedule | None = None) -> Partials | None:
    """As the direct form's, of a buffer of planes [slots, 4, H + 2, ceil(W / 2), C]."""
    import triton

    from .triton import winograd_kernel

    (d, h, w, k), c, pairs = out.shape, weight.channels, x.shape[3]
    s = schedule or pick(here, x.dtype, c, k, (geometry.frame_rows or h, w))
    if not x.is_meta and out.data_ptr() == x.data_ptr():
        raise ValueError("conv3d in Winograd form cannot overwrite its input")
    # Without sums nothing ties a tile to a band, and one block for the plane wastes least.
    block = ROW_BLOCK if epilogue.groups else h
    full, rest = divmod(h, block)
    block_tiles = triton.cdiv(block * pairs, s.bm)
    frame_tiles = full * block_tiles + triton.cdiv(rest * pairs, s.bm)
    partials = None
    if epilogue.groups:
        span = stat_span(k, epilogue.groups, min(s.bn // s.slices, s.tail or s.bn))
        shape = (d, frame_tiles * 2, k // span, 2)
        partials = Partials(torch.empty(shape, dtype=torch.float32, device=x.device), span)
    operands: list[Any] = [x, weight.data, weight.data] * 2
    if here.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        blocks = [(n, depth) for depth in (s.bk, s.rest) for n in (s.bm, s.bn, s.tail)]
        operands = [
            TensorDescriptor(t, t.shape, t.stride(), [*size]) if all(size) else t
            for t, size in zip([x.view(-1, c), weight.data, weight.data] * 2, blocks, strict=True)
        ]
    told = finish(x, weight, out, epilogue, partials)
    winograd_kernel[(d * frame_tiles * triton.cdiv(k, s.bn + s.tail),)](
        *operands, out if weight.mix is None else weight.mix, out, *told.tensors, *told.numbers,
        x.shape[0], start, PLANES * x.shape[2] * pairs, x.shape[2] * pairs, h, w, pairs, block, block_tiles,
        frame_tiles, d * frame_tiles, *told.strides,
        C=c, K=k, KT=weight.kernel[0], KH=weight.kernel[1], MIX=weight.mix is not None, **told.constants,
        **accumulation(x, epilogue, here), TMA=here.tma, SLICES=s.slices, GROUP=s.group, BM=s.bm, BN=s.bn, TAIL=s.tail,
        BK=s.bk, REST=s.rest, num_warps=s.warps, num_stages=s.stages,
    )  # fmt: skip
    return partials
