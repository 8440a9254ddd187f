"""Dispatch of attention: flash where the head is small enough, our kernels above, torch where there are none."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..descriptor import Descriptor
from ..launching import launcher
from ..observe import observed
from ..targets import Target, interpreted, kernels_for, on_device
from . import reference
from .schedules import GATHER, SCHEDULES, Blocks, Schedule, pick

FLASH_HEAD = 256  # the largest head of torch's flash kernels
LARGEST_HEAD = 1024


def scratch_bytes(tokens: int, itemsize: int, head: int, clip: bool = False) -> int:
    """Return the most bytes of `scratch` that one call of `attention` uses over this many tokens, on any GPU. clip: as
    there."""
    if head > LARGEST_HEAD:
        return 0
    return max(Blocks.of(tokens, itemsize, scores, head, clip).split(itemsize, head)[2]
               for scores, _ in SCHEDULES.values())  # fmt: skip


def torch_bytes(tokens: int, itemsize: int, head: int) -> int:
    """Return the bytes that one call of `attention` allocates where no kernel of ours takes so large a head: torch's
    result, and its sums in float32."""
    return tokens * head * (itemsize + 4) if head > LARGEST_HEAD else 0


@observed
def attention(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None,
              clip: bool = False, backend: str = "auto") -> Tensor:
    """Compute single-head attention within each of B frames, or (`clip`) clips: softmax(q k^T / sqrt(D)) v.

    Memory is O(N): about 128 MiB of scratch, or for a `clip` up to 1 GiB.

    Args:
        q, k, v: [B, N, D] contiguous, fp16 or bf16 (fp32 runs torch), D a multiple of 8.
        out: memory our kernels may put the result in; may be q's.
        scratch: uint8, `scratch_bytes` of it; allocated where there is none.
        backend: "reference" is fp32 arithmetic.

    Returns:
        [B, N, D].

    Raises:
        ValueError: shapes or types differ.
    """
    if q.shape != k.shape or q.shape != v.shape or q.dim() != 3 or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention needs three [B, N, D] of one type, not {list(q.shape)}, {list(k.shape)}")
    if backend == "reference":
        return reference.attention(q, k, v)
    head = q.shape[2]
    fits = q.dtype in (torch.float16, torch.bfloat16) and FLASH_HEAD < head <= LARGEST_HEAD and head % 8 == 0
    if backend == "triton" and head > LARGEST_HEAD:
        raise ValueError(f"no attention kernel for a head of {head}")
    here = kernels_for(q.device, backend) if fits or backend == "triton" else None
    if here is not None:
        with on_device(q):
            return launch(q.contiguous(), k.contiguous(), v.contiguous(), here, out=out, scratch=scratch, clip=clip)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def launch(q: Tensor, k: Tensor, v: Tensor, here: Target,
           schedules: tuple[Schedule, Schedule] | None = None, out: Tensor | None = None,
           scratch: Tensor | None = None, clip: bool = False) -> Tensor:
    """Run the kernels on contiguous tensors; `schedules` overrides the table (checks and tuning only)."""
    frames, tokens, head = q.shape
    scores, values = schedules or pick(here.sm)
    blocks = Blocks.of(tokens, q.element_size(), scores, head, clip)
    rows, stride, tiles = blocks.rows, blocks.stride, blocks.tiles
    split, behind, end = blocks.split(q.element_size(), head)
    if scratch is None or scratch.numel() < end:
        scratch = torch.empty(end, dtype=torch.uint8, device=q.device)
    weights = scratch[:split].view(q.dtype).view(rows, stride)
    peaks, totals = scratch[split:behind].view(torch.float32).view(2, tiles, rows)
    out = torch.empty_like(q) if out is None else out
    cut = blocks.parts > 1
    sums = scratch[behind:end].view(torch.float32) if cut else out
    operands: list[Any] = [q, k, weights, v]
    if here.tma:
        boxes = ([scores.positions, scores.depth], [scores.columns, scores.depth],
                 [values.positions, values.depth], [values.depth, values.columns])  # fmt: skip
        flat = [t.view(-1, t.shape[-1]) for t in operands]
        operands = [Descriptor(t, b) for t, b in zip(flat, boxes, strict=True)]
    qs, ks, ws, vs = operands
    merge_rows, merge_tiles = blocks.merge
    common = {"D": head, "TMA": here.tma, "UNIT": scores.columns,
              "UPCAST": interpreted() and q.is_cpu and q.dtype == torch.bfloat16}
    for frame in range(frames):
        for top in range(0, tokens, rows):
            n = min(rows, tokens - top)
            place = (frame * tokens + top, frame * tokens, n, tokens, tiles)
            row_tiles = -(-n // scores.positions)
            launcher("attention.scores_kernel", here)[(row_tiles * tiles,)](
                qs, ks, weights, peaks, totals, *place, math.log2(math.e) / math.sqrt(head), **common,
                BM=scores.positions, BN=scores.columns, BK=scores.depth,
                num_warps=scores.warps, num_stages=scores.stages,
            )  # fmt: skip
            padded = row_tiles * scores.positions
            launcher("attention.merge_kernel", here)[(padded // merge_rows,)](
                peaks, totals, padded, tiles, BT=merge_tiles, BR=merge_rows, num_warps=4)
            launcher("attention.values_kernel", here)[(row_tiles, -(-head // values.columns), blocks.parts)](
                ws, vs, totals, sums, *place, blocks.each, **common, KEYS=scores.columns, SPLIT=cut,
                BM=values.positions, BN=values.columns, BK=values.depth,
                num_warps=values.warps, num_stages=values.stages,
            )  # fmt: skip
            if cut:
                launcher("attention.gather_kernel", here)[(-(-n // GATHER[0]), -(-head // GATHER[1]))](
                    sums, out, place[0], n, padded, blocks.parts, D=head, BR=GATHER[0], BD=GATHER[1], num_warps=4)
    return out
