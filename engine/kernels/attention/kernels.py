# ruff: noqa: ANN001, ANN201
"""Attention for head sizes that flash kernels refuse (257 to 1024), as two matrix products and a merge between them.

A flash kernel keeps a whole output row in registers, which at 512 columns leaves tiles too small for the matrix units.
Here a block of queries stores its softmax weights, each tile of keys relative to the tile's own peak; the merge finds
what each tile must be scaled by; the second product scales as it sums. Where a block has too few rows to occupy a GPU,
the second product is cut into parts of the keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..conv3d.kernels import dot


@triton.jit(do_not_specialize=["query", "key", "rows", "tokens", "stride"])
def scores_kernel(q, k, weights, peaks, totals, query, key, rows, tokens, stride, scale_log2,
                  D: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, UNIT: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Program (row tile, key tile), row tiles first: weights[r, j] = 2^(score - peak), and the tile's peak and total of
    each row. On one axis: a clip may have more key tiles than another one takes (65,535).

    query, key: the rows of q [.., D] and k [.., D] that this block and this frame start at.
    """
    row_tiles = (rows + BM - 1) // BM
    m0, tile = tl.program_id(0) % row_tiles * BM, tl.program_id(0) // row_tiles
    n0 = tile * BN
    m, n, d = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for c0 in range(0, D, BK):
        if TMA:
            qt = q.load([query + m0, c0])
            kt = k.load([key + n0, c0])
        else:
            real = (c0 + d < D)[None, :]
            qt = tl.load(q + (query + m).to(tl.int64)[:, None] * D + c0 + d[None, :],
                         mask=(m < rows)[:, None] & real, other=0.0)
            kt = tl.load(k + (key + n).to(tl.int64)[:, None] * D + c0 + d[None, :],
                         mask=(n < tokens)[:, None] & real, other=0.0)
        acc = dot(qt, kt.T, acc, UPCAST)
    scores = tl.where((n < tokens)[None, :], acc * scale_log2, float("-inf"))
    peak = tl.max(scores, 1)
    weight = tl.exp2(scores - peak[:, None])
    at = tile * (row_tiles * BM) + m
    tl.store(peaks + at, peak)
    tl.store(totals + at, tl.sum(weight, 1))
    base = weights + m0.to(tl.int64) * (stride * UNIT) + n0
    where = base + tl.arange(0, BM).to(tl.int64)[:, None] * (stride * UNIT) + tl.arange(0, BN)[None, :]
    tl.store(where, weight.to(weights.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "tiles"])
def merge_kernel(peaks, totals, rows, tiles, BT: tl.constexpr, BR: tl.constexpr):
    """totals[t, r] becomes what the weights of tile t in row r are multiplied by."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    t = tl.arange(0, BT)
    peak = tl.full((BR,), float("-inf"), tl.float32)
    for t0 in range(0, tiles, BT):
        at = (t0 + t)[:, None] * rows + r[None, :]
        peak = tl.maximum(peak, tl.max(tl.load(peaks + at, mask=(t0 + t < tiles)[:, None], other=float("-inf")), 0))
    total = tl.zeros((BR,), tl.float32)
    for t0 in range(0, tiles, BT):
        at = (t0 + t)[:, None] * rows + r[None, :]
        mask = (t0 + t < tiles)[:, None]
        factor = tl.exp2(tl.load(peaks + at, mask=mask, other=float("-inf")) - peak[None, :])
        total += tl.sum(tl.load(totals + at, mask=mask, other=0.0) * factor, 0)
    for t0 in range(0, tiles, BT):
        at = (t0 + t)[:, None] * rows + r[None, :]
        mask = (t0 + t < tiles)[:, None]
        factor = tl.exp2(tl.load(peaks + at, mask=mask, other=float("-inf")) - peak[None, :])
        tl.store(totals + at, factor / total[None, :], mask=mask)


@triton.jit(do_not_specialize=["query", "key", "rows", "tokens", "stride", "each"])
def values_kernel(weights, v, factors, out, query, key, rows, tokens, stride, each,
                  D: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, UNIT: tl.constexpr,
                  SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Program (row tile, slice of BN columns, part): out[r] = sum over tiles of factor * weights[r, tile] @ v[tile].

    KEYS: keys of one tile of the factors, a multiple of BK. SPLIT: a part is `each` of the tiles, and its sum in fp32
    goes to out[part, r].
    """
    m0, n0 = tl.program_id(0) * BM, tl.program_id(1) * BN
    m, n, j = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    begin, end = 0, stride * UNIT
    if SPLIT:
        begin = tl.program_id(2) * each * KEYS
        end = tl.minimum(begin + each * KEYS, end)
    for j0 in range(begin, end, BK):
        if SPLIT and TMA:  # behind the bulk copies it would spill on sm_90
            factor = tl.load(factors + j0 // KEYS * (tl.num_programs(0) * BM) + m)
        if TMA:
            wt = weights.load([m0, j0])
            vt = v.load([key + j0, n0])
        else:
            wt = tl.load(weights + m.to(tl.int64)[:, None] * (stride * UNIT) + j0 + j[None, :])
            vt = tl.load(v + (key + j0 + j).to(tl.int64)[:, None] * D + n[None, :],
                         mask=(j0 + j < tokens)[:, None] & (n < D)[None, :], other=0.0)
        if not (SPLIT and TMA):
            factor = tl.load(factors + j0 // KEYS * (tl.num_programs(0) * BM) + m)
        acc += dot(wt, vt, tl.zeros((BM, BN), tl.float32), UPCAST) * factor[:, None]
    row = query + m
    if SPLIT:
        row = tl.program_id(2) * (tl.num_programs(0) * BM) + m
    where = out + row.to(tl.int64)[:, None] * D + n[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < D)[None, :])


@triton.jit(do_not_specialize=["query", "rows", "padded", "parts"])
def gather_kernel(sums, out, query, rows, padded, parts, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """out[r] = the parts' sums, added in their order. padded: rows of a part."""
    r, n = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BD + tl.arange(0, BD)
    real = (r < rows)[:, None] & (n < D)[None, :]
    acc = tl.zeros((BR, BD), tl.float32)
    for part in range(0, parts):
        acc += tl.load(sums + (part * padded + r).to(tl.int64)[:, None] * D + n[None, :], mask=real, other=0.0)
    tl.store(out + (query + r).to(tl.int64)[:, None] * D + n[None, :], acc.to(out.dtype.element_ty), mask=real)
