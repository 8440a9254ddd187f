# ruff: noqa: ANN001, ANN201, SIM108
"""Streaming-softmax attention for head sizes that flash kernels refuse (384 to 1024): O(N) memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def attention_kernel(q, k, v, out, tokens, scale_log2,
                     D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Rows of q, k, v, out are [frames * tokens, D], DP >= D a power of two. Program (tile, value slice, frame)."""
    m0 = tl.program_id(0) * BM
    v0 = tl.program_id(1) * DV
    first = tl.program_id(2) * tokens
    m = m0 + tl.arange(0, BM)
    d = tl.arange(0, DP)
    dv = v0 + tl.arange(0, DV)
    j = tl.arange(0, BN)
    if TMA:
        qt = q.load([first + m0, 0])
    else:
        qt = tl.load(q + (first + m).to(tl.int64)[:, None] * D + d[None, :],
                     mask=(m < tokens)[:, None] & (d < D)[None, :], other=0.0)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DV), tl.float32)
    for n0 in range(0, tokens, BN):
        # The last tile of a frame may read on into the next frame's rows: their scores are masked.
        if TMA:
            kt = k.load([first + n0, 0])
            vt = v.load([first + n0, v0])
        else:
            rows = (first + n0 + j).to(tl.int64)[:, None] * D
            real = (n0 + j < tokens)[:, None]
            kt = tl.load(k + rows + d[None, :], mask=real & (d < D)[None, :], other=0.0)
            vt = tl.load(v + rows + dv[None, :], mask=real & (dv < D)[None, :], other=0.0)
        if UPCAST:
            scores = tl.dot(qt.to(tl.float32), kt.to(tl.float32).T)
        else:
            scores = tl.dot(qt, kt.T)
        scores = tl.where((n0 + j < tokens)[None, :], scores * scale_log2, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if UPCAST:
            acc = tl.dot(weights, vt.to(tl.float32), acc)
        else:
            acc = tl.dot(weights.to(vt.dtype), vt, acc)
        peak = higher
    acc = acc / total[:, None]
    tl.store(out + (first + m).to(tl.int64)[:, None] * D + dv[None, :], acc.to(out.dtype.element_ty),
             mask=(m < tokens)[:, None] & (dv < D)[None, :])
