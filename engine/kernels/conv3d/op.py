"""3-D convolution over bordered channels-last buffers: the check of its arguments and the launch of its kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..descriptor import Descriptor
from ..launching import launcher
from ..operators import HALVES, Takes, operator
from ..targets import FP8, Target, interpreted, triton_version, widened
from . import reference
from .arguments import Arguments, finish
from .schedules import ROW_BLOCK, Schedule, pick
from .tuned import chosen
from .types import Epilogue, Geometry, Partials, Weight, stat_span
from .winograd2d import launch as winograd

_OPERANDS = (*HALVES, FP8, torch.int8)
_PLAIN, _NOTHING = Geometry(), Epilogue()


def _check(x: Tensor, weight: Weight, out: Tensor, *, geometry: Geometry = _PLAIN, epilogue: Epilogue = _NOTHING,
           start: int = 0, first: int = 2, **_: Any) -> None:
    shape, filled, dtype, (pt, py, px) = x.shape, out.shape, x.dtype, weight.phases
    if len(shape) != 4 or not x.is_contiguous() or (dtype not in _OPERANDS and dtype != torch.float32):
        raise ValueError(f"conv3d input must be a contiguous [slots, Hp, Wp, C] buffer, not {x.dtype} {list(x.shape)}")
    if dtype != weight.data.dtype or shape[3] != weight.channels or x.device != weight.data.device:
        raise ValueError(f"conv3d weight is {weight.data.dtype} for {weight.channels} channels, "
                         f"the buffer {x.dtype} with {x.shape[-1]}")
    if len(filled) != 4 or filled[3] != weight.out_channels or out.stride(3) != 1:
        raise ValueError(f"conv3d output must be [D, H, W, {weight.out_channels}] with unit channel stride")
    made = filled[0] + (weight.folded > 0 and first == 0)
    if made % pt or filled[1] % py or filled[2] % px:
        raise ValueError(f"conv3d output {list(out.shape)} does not divide into phases {weight.phases}")
    (st, sy, sx), (kt, ky, kx), (top, left) = geometry.stride, weight.kernel, geometry.origin
    slots = (made // pt - 1) * st + kt
    rows = (filled[1] // py - 1) * sy + ky + top + (weight.shifted and py > 1)
    columns = (filled[2] // px - 1) * sx + kx + left + (weight.shifted and px > 1)
    if weight.tiles and weight.phases != (1, 1, 1) and epilogue.groups:
        raise ValueError("conv3d in Winograd form makes no sums of outputs that lie between each other")
    if weight.tiles and (geometry.stride != (1, 1, 1) or geometry.first_row % 2 or out.dtype != dtype
                         or epilogue.pixels or epilogue.scale != 1.0):  # fmt: skip
        raise ValueError(f"conv3d of tiles makes {x.dtype} with stride 1, from an even row on, not {out.dtype} "
                         f"({geometry})")
    if weight.tiles and out.data_ptr() == x.data_ptr() and not x.is_meta:
        raise ValueError("conv3d in Winograd form cannot overwrite its input")
    if slots > shape[0] or not 0 <= start < shape[0] or rows > shape[1] or columns > shape[2]:
        raise ValueError(f"conv3d of {list(x.shape)} cannot fill {list(out.shape)} (start {start}, {geometry})")
    if epilogue.residual is not None and (epilogue.residual.shape != filled or epilogue.residual.stride(3) != 1):
        raise ValueError("conv3d residual must have the output's shape and unit channel stride")
    if epilogue.groups and weight.out_channels % epilogue.groups:
        raise ValueError(f"{weight.out_channels} channels do not divide into {epilogue.groups} groups")
    if geometry.first_row and epilogue.groups and geometry.first_row % ROW_BLOCK:
        raise ValueError(f"a band with statistics must start at a multiple of {ROW_BLOCK} rows, "
                         f"not {geometry.first_row}")


@operator("conv_kernel", "gluon.mma_kernel", "taps.taps_kernel", reference=reference.conv3d, check=_check,
          takes=Takes(*_OPERANDS))  # fmt: skip
def conv3d(here: Target, x: Tensor, weight: Weight, out: Tensor, *, geometry: Geometry = _PLAIN,
           epilogue: Epilogue = _NOTHING, start: int = 0, first: int = 2,
           schedule: Schedule | None = None) -> Partials | None:
    """Convolve a bordered buffer into `out`.

    Args:
        x: [slots, Hp, Wp, C] contiguous, operand type of the weight, borders already in place; a ring: output frame d
            reads slots (start + d * stride + 0..kt-1) mod slots. weight.channels == C.
        out: [D * pt, H * py, W * px, K], any strides but 1 over channels: a plain tensor, the inside of the next conv's
            buffer, a slice. A folded weight at first == 0 (the clip starts here) yields one frame less.
        first: index of the first input frame within its clip, for folded weights.
        schedule: overrides the table (checks and tuning only).

    Returns:
        The sums that `epilogue.groups` requests, or None.

    Raises:
        ValueError: shapes, types or strides do not fit together.
    """
    if weight.tiles:
        return winograd.launch(x, weight, out, geometry, epilogue, start)
    (slots, rows, columns, _), (frames, h, w, _), (pt, py, px) = x.shape, out.shape, weight.phases
    drop = int(weight.folded > 0 and first == 0)
    k, phases = weight.out_channels, pt * py * px
    d, h, w = (frames + drop) // pt, h // py, w // px
    frame_rows = geometry.frame_rows or h
    sums = _accumulation(x, epilogue, here)
    s = schedule or chosen(x.device, here.way, weight, sums["ACC"], (frame_rows, w), geometry, epilogue.groups)
    # Block-scaled products and Triton's interpreter are of its own language alone.
    mma = here.mma_sync and sums["ACC"] != "mx" and not (x.is_cpu and interpreted())
    share = mma and geometry.stride == (1, 1, 1) and sums["ACC"] != "f16"
    s = s or pick(here, x.dtype, weight.channels, k, (frame_rows, w), phases, weight.kernel[2], epilogue.groups > 0,
                  share)
    one_tile = k <= s.columns + s.tail and phases == 1 and weight.taps == 1
    if not x.is_meta and out.data_ptr() == x.data_ptr() and not one_tile:
        raise ValueError(f"conv3d cannot overwrite its input: {k} channels are more than one tile, or it has many taps")
    slices = _slices(s, weight, geometry, epilogue) if mma else s.slices
    linear = (mma or here.tma) and geometry.stride == (1, 1, 1)
    pitch = columns if linear else w
    # Without sums tiles need not align with bands, and one block for the plane wastes least.
    block = ROW_BLOCK if epilogue.groups else h
    full, rest = divmod(h, block)
    block_tiles = -(-block * pitch // s.positions)
    frame_tiles = full * block_tiles + -(-rest * pitch // s.positions)
    span = stat_span(k, epilogue.groups, min(s.columns // slices, s.tail or s.columns)) if epilogue.groups else 0
    partials = None
    if span:
        shape = (frames, frame_tiles * py * px, k // span, 2)
        partials = Partials(torch.empty(shape, dtype=torch.float32, device=x.device), span)
    # Taps that share a run are one tap as wide as all of them.
    taps = 1 if weight.channels % s.depth else weight.kernel[2]
    run = weight.channels * weight.kernel[2] // taps
    # Taps that share positions are one step.
    shared = taps if share and s.shared else 1
    taps //= shared
    kernel, operands = "conv3d.conv_kernel", [x, weight.data, weight.data] * 2
    if mma:
        # Of 16 bit, positions that stay in registers were slower.
        kernel = "conv3d.taps_kernel" if shared > 1 and x.dtype == torch.int8 else "conv3d.mma_kernel"
        operands = [x, weight.data]
        steps = math.prod(weight.kernel[:2]) * taps * -(-run // s.depth)
        form = _loop(s, steps, x.dtype, sums["ACC"]) | {"LINEAR": linear, "SHARE": shared}
    else:
        form = sums | {"TMA": linear, "REST": s.rest, "num_stages": s.stages}
    if linear and not mma:
        # Rows of a run overlap; none reaches beyond the buffer's end.
        runs = x.view(-1).as_strided((x.numel() // weight.channels - run // weight.channels + 1, run),
                                     (weight.channels, 1))
        tiles = [(n, depth) for depth in (s.depth, s.rest) for n in (s.positions, s.columns, s.tail)]
        for i, (t, tile) in enumerate(zip([runs, weight.data, weight.data] * 2, tiles, strict=True)):
            if all(tile):
                operands[i] = Descriptor(t, tile)
    head, strides, constants = finish(x, weight, out, epilogue, partials)
    arguments = Arguments(
        *head, slots=slots, start=start, in_frame=rows * columns, in_pitch=columns,
        origin=geometry.origin[0] * columns + geometry.origin[1], height=h, width=w, pitch=pitch, row_block=block,
        block_tiles=block_tiles, frame_tiles=frame_tiles, tiles=d * frame_tiles, first=first, drop=drop,
        first_row=geometry.first_row, last_row=frame_rows - 1, **strides,
    )  # fmt: skip
    launcher(kernel, here)[(d * frame_tiles * -(-k // (s.columns + s.tail)) * phases,)](
        *operands, *arguments, C=weight.channels, RUN=run, K=k, KT=weight.kernel[0], KH=weight.kernel[1], KW=taps,
        ST=geometry.stride[0], SH=geometry.stride[1], SW=geometry.stride[2], PT=pt, PY=py, PX=px,
        SHIFTED=weight.shifted, FOLDED=weight.folded, **constants, **form, SLICES=slices, GROUP=s.group,
        BM=s.positions, BN=s.columns, TAIL=s.tail, BK=s.depth, num_warps=s.warps,
    )  # fmt: skip
    return partials


def _accumulation(x: Tensor, epilogue: Epilogue, here: Target) -> dict[str, Any]:
    """Return as constants how products are added; Triton's interpreter replaces the forms it cannot run."""
    accumulate = here.accumulate(x.dtype, epilogue.half_accumulate)
    if x.is_cpu and interpreted() and accumulate == "mx" and (triton_version() or (0, 0)) < (3, 9):
        accumulate = "f32"  # dot_scaled crashes in the interpreters before 3.9
    return {"ACC": accumulate, "UPCAST": widened(x) and accumulate != "mx"}


def _slices(s: Schedule, weight: Weight, geometry: Geometry, epilogue: Epilogue) -> int:
    """Return the slices of `mma_kernel`'s epilogue: quarters where halves would spill. That is beside the rows of a
    tall tile with strides; beside a residual that is not as wide as the input; of int8 with a residual and sums in four
    warps, and of 256 channels in bf16; and in 16 bit where one turn of the loop is all of it."""
    if s.columns < 128:
        return s.slices
    residual, eight, channels = epilogue.residual, weight.data.dtype.itemsize == 1, weight.channels
    strided = geometry.stride != (1, 1, 1) and s.positions > 128
    shortcut = residual is not None and channels != weight.out_channels and weight.phases == (1, 1, 1) and not eight
    all_of_it = False
    if residual is not None and epilogue.groups and weight.data.dtype == torch.int8:
        square = channels == weight.out_channels == s.columns == 256
        all_of_it = s.warps == 4 or (square and residual.dtype == torch.bfloat16)
    one_turn = s.columns == 256 and weight.taps == 1 and channels == s.depth * s.stages and not eight
    return 4 if strided or shortcut or all_of_it or one_turn else s.slices


#: The most fp16 products that are summed in fp16 before the sum is added to others.
_FP16_DEPTH = 512


def _loop(s: Schedule, steps: int, dtype: torch.dtype, accumulate: str) -> dict[str, Any]:
    """Return as constants how `mma_kernel` goes through its steps.

    TURNS: how many rounds of the buffers make one turn of its loop, at whose end fp16 sums of fp16 products are added
    to others: as many as leave the fewest steps over. AHEAD: 2 where a turn ends with the next one's operands in
    registers. Those of 8 bit would be unpacked there; they do not fit beside fp16 sums of a pair of tiles, which go
    into fp32, nor in four warps where a step is one slice. STAGES: fewer where each step adds fp16 sums of a pair.
    """
    stages = s.stages
    if accumulate == "f16" and dtype.itemsize == 1 and s.tail:
        stages = min(stages, 2 if s.tail > 32 else 3)
    most = max(_FP16_DEPTH // (s.depth * stages), 1) if accumulate == "f16" and dtype == torch.float16 else 1
    turns = 1 if most == 1 else min(range(most, 0, -1), key=lambda n: -(-steps // (stages * n)) * n)
    one_slice = s.depth * dtype.itemsize == 32 and s.warps == 4
    ahead = 2 if dtype.itemsize == 2 and not one_slice and (accumulate == "f32" or not s.tail) else 1
    return {"ACC": accumulate, "STAGES": stages, "TURNS": turns, "AHEAD": ahead}
