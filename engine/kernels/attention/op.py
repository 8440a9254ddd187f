"""Single-head attention: torch's flash kernels where the head is small enough, ours above, torch where there are
none."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..descriptor import Descriptor
from ..launching import launcher
from ..operators import HALVES, Takes, operator
from ..precision import exact_math
from ..targets import Target, widened
from .schedules import GATHER, SCHEDULES, Blocks, Schedule, pick

FLASH_HEAD = 256  # the largest head of torch's flash kernels
LARGEST_HEAD = 1024
#: Queries of one block of the reference: their scores against 129,600 tokens are 253 MiB in fp32.
QUERIES = 512


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


def _check(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> None:
    if q.shape != k.shape or q.shape != v.shape or q.dim() != 3 or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention needs three [B, N, D] of one type, not {list(q.shape)}, {list(k.shape)}")


def _reference(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """In fp32 arithmetic, a block of queries at a time; these may be fewer than the keys."""
    scale = q.shape[-1] ** -0.5
    out = torch.empty_like(q)
    with exact_math(q.device):
        for b in range(q.shape[0]):
            keys, values = k[b].float(), v[b].float()
            for top in range(0, q.shape[1], QUERIES):
                scores = q[b, top : top + QUERIES].float() @ keys.T
                out[b, top : top + QUERIES] = (scores * scale).softmax(-1) @ values
    return out


def _by_torch(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


@operator(
    "scores_kernel", "merge_kernel", "values_kernel", "gather_kernel", reference=_reference, check=_check,
    takes=Takes(*HALVES, head=range(FLASH_HEAD + 8, LARGEST_HEAD + 1, 8)), otherwise=_by_torch,
    sizes=lambda q, *_, **__: {"head": q.shape[2]},
)  # fmt: skip
def attention(here: Target, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None,
              scratch: Tensor | None = None, clip: bool = False,
              schedules: tuple[Schedule, Schedule] | None = None) -> Tensor:
    """Compute single-head attention within each of B frames, or (`clip`) clips: softmax(q k^T / sqrt(D)) v.

    Memory is O(N): about 128 MiB of scratch, or for a `clip` up to 1 GiB.

    Args:
        q, k, v: [B, N, D] contiguous, fp16 or bf16 (fp32 runs torch), D a multiple of 8.
        out: memory our kernels may put the result in; may be q's.
        scratch: uint8, `scratch_bytes` of it; allocated where there is none.
        schedules: override the table (checks only).

    Returns:
        [B, N, D].

    Raises:
        ValueError: shapes or types differ.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
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
              "UPCAST": widened(q)}
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
