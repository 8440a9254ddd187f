# ruff: noqa: ANN001, ANN201, ANN202
"""Passes over tokens: each program has one row, or a part of one where no sum over it is needed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(BLOCK: tl.constexpr, TURN: tl.constexpr):
    """Return the columns of a row in the order that its program has them. Where 256 are rotated together, a thread has
    columns that lie 64 apart, so that three of four stages are its own: exchanges between threads took most of the
    time."""
    c = tl.arange(0, BLOCK)
    if TURN == 256:
        c = c % (BLOCK // 4) // 64 * 256 + c // (BLOCK // 4) * 64 + c % 64
        c = tl.max_contiguous(tl.multiple_of(c, 64), 64)
    return c


@triton.jit
def _stage(v, BLOCK: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Rotate each four values of which two lie NEAR apart and two pairs FAR: half their sum, less the one in the
    opposite place."""
    four = tl.reshape(v, (BLOCK // (2 * FAR), 2, FAR // (2 * NEAR), 2, NEAR))
    near = tl.flip(four, 3)
    pairs = four + near
    return tl.reshape(0.5 * (pairs + tl.flip(pairs, 1)) - tl.flip(near, 1), (BLOCK,))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store(values, out, scales, row, at, real, LIMIT: tl.constexpr, TURN: tl.constexpr, BLOCK: tl.constexpr):
    """TURN > 0: first rotate each TURN columns, a power of 4, stage by stage; values and `at` are in the order of
    `_places`. LIMIT > 0: in 8 bit, the row's largest becomes that. 127: whole numbers. What is not finite makes the
    row's scale NaN, and so all that is made of the row."""
    if TURN == 256:
        values = _stage(values, BLOCK, 1, 2)
        values = _stage(values, BLOCK, 4, 8)
        values = _stage(values, BLOCK, 16, 32)
        values = _stage(values, BLOCK, BLOCK // 4, BLOCK // 2)
    else:
        if TURN >= 4:
            values = _stage(values, BLOCK, 1, 2)
        if TURN >= 16:
            values = _stage(values, BLOCK, 4, 8)
        if TURN >= 64:
            values = _stage(values, BLOCK, 16, 32)
        if TURN >= 1024:
            values = _stage(values, BLOCK, 64, 128)
            values = _stage(values, BLOCK, 256, 512)
        if TURN >= 4096:
            values = _stage(values, BLOCK, 1024, 2048)
        if TURN >= 16384:
            values = _stage(values, BLOCK, 4096, 8192)
    if LIMIT > 0:
        largest = tl.reduce(tl.abs(values), 0, _larger)
        scale = tl.where(largest < float("inf"), tl.maximum(largest / LIMIT, 1e-12), float("nan"))
        tl.store(scales + row, scale)
        if LIMIT == 127:
            # The low byte of a float of 3 * 2^22 and a small whole number is that number: conversions are slow.
            values = (values * (1.0 / scale) + 12582912.0).to(tl.int32, bitcast=True)
        else:
            values = tl.minimum(tl.maximum(values / scale, -LIMIT), LIMIT)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=real)


@triton.jit
def normalised_kernel(x, y, scale, weight, out, scales, eps,
                      D: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, LIMIT: tl.constexpr,
                      TURN: tl.constexpr):  # fmt: skip
    """x += y * scale, stored as x is; then over sqrt(mean square + eps), times weight."""
    row = tl.program_id(0).to(tl.int64)
    c = _places(BLOCK, TURN)
    real, at = c < D, row * D + c
    v = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(y + at, mask=real, other=0.0).to(tl.float32)
        v += more * tl.load(scale + c, mask=real, other=0.0).to(tl.float32)
        kept = v.to(x.dtype.element_ty)
        tl.store(x + at, kept, mask=real)
        v = kept.to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / D + eps) * tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
    _store(v, out, scales, row, at, real, LIMIT, TURN, BLOCK)


@triton.jit(do_not_specialize=["tokens"])
def rotated_kernel(qkv, turns, tokens, eps, HEADS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr,
                   BH: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """Queries (axis 1: 0) or keys (1) of one row in place: over sqrt(mean square + eps), then channels i and HALF + i
    turned by the row's angles. Channels behind 2 HALF are not turned."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, i, j = tl.arange(0, BH), tl.arange(0, BR), tl.arange(0, BP)
    rest = HEAD - 2 * HALF
    base = qkv + row * (HEADS * 3 * HEAD) + (h * (3 * HEAD) + which * HEAD)[:, None]
    turned, plain = (h < HEADS)[:, None] & (i < HALF)[None, :], (h < HEADS)[:, None] & (j < rest)[None, :]
    a = tl.load(base + i[None, :], mask=turned, other=0.0).to(tl.float32)
    b = tl.load(base + HALF + i[None, :], mask=turned, other=0.0).to(tl.float32)
    p = tl.load(base + 2 * HALF + j[None, :], mask=plain, other=0.0).to(tl.float32)
    square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(p * p, 1)
    over = tl.rsqrt(square / HEAD + eps)[:, None]
    angles = turns + (row % tokens) * (2 * HALF)
    cos = tl.load(angles + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF + i, mask=i < HALF, other=0.0)[None, :]
    a, b, p = a * over, b * over, p * over
    tl.store(base + i[None, :], (a * cos - b * sin).to(qkv.dtype.element_ty), mask=turned)
    tl.store(base + HALF + i[None, :], (a * sin + b * cos).to(qkv.dtype.element_ty), mask=turned)
    tl.store(base + 2 * HALF + j[None, :], p.to(qkv.dtype.element_ty), mask=plain)


@triton.jit
def _gated(gate, value):
    """Multiply SiLU of a gate, which is 0 at -inf, where its quotient would be NaN, by a value."""
    return tl.where(gate == float("-inf"), 0.0, gate / (1.0 + tl.exp(-gate))) * value


@triton.jit
def gated_kernel(x, out, scales, D: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, TURN: tl.constexpr):
    """Multiply SiLU of the first half of [R, 2 D] by the second. A program has a whole row where LIMIT > 0."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + _places(BLOCK, TURN)
    real = c < D
    gate = tl.load(x + row * (2 * D) + c, mask=real, other=0.0).to(tl.float32)
    value = tl.load(x + row * (2 * D) + D + c, mask=real, other=0.0).to(tl.float32)
    _store(_gated(gate, value), out, scales, row, row * D + c, real, LIMIT, TURN, BLOCK)


@triton.jit
def rounded_kernel(x, out, scales, D: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, TURN: tl.constexpr,
                   ZEROED: tl.constexpr):  # fmt: skip
    """ZEROED: NaN becomes 0."""
    row = tl.program_id(0).to(tl.int64)
    c = _places(BLOCK, TURN)
    real = c < D
    v = tl.load(x + row * D + c, mask=real, other=0.0).to(tl.float32)
    if ZEROED:
        v = tl.where(v == v, v, 0.0)
    _store(v, out, scales, row, row * D + c, real, LIMIT, TURN, BLOCK)


@triton.jit
def summed_kernel(sums, rows, columns, bias, out, scale, D: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
                  ADDS: tl.constexpr):  # fmt: skip
    """Sums of whole numbers to what they stand for, plus a bias. PAIRS: even columns are gates of the odd ones. ADDS:
    out += this * scale."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = c < D
    v = tl.load(sums + row * D + c, mask=real, other=0).to(tl.float32) * tl.load(rows + row)
    v = v * tl.load(columns + c, mask=real, other=0.0) + tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    if PAIRS:
        gate, value = tl.split(tl.reshape(v, (BLOCK // 2, 2)))
        c = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        tl.store(out + row * (D // 2) + c, _gated(gate, value).to(out.dtype.element_ty), mask=c < D // 2)
    else:
        if ADDS:
            v = v * tl.load(scale + c, mask=real, other=0.0).to(tl.float32)
            v += tl.load(out + row * D + c, mask=real, other=0.0).to(tl.float32)
        tl.store(out + row * D + c, v.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(x, weight, scales, columns, bias, out, scale, rows, N: tl.constexpr, K: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
                   ADDS: tl.constexpr):  # fmt: skip
    """x [R, K] times weight [N, K] in int8: what the sums stand for, plus a bias. GROUP tiles of rows follow each other
    under one tile of the weight. PAIRS: even columns are gates of the odd ones. ADDS: out += this * scale."""
    pid, across = tl.program_id(0), N // BN
    first = pid // (GROUP * across) * GROUP
    size = tl.minimum(tl.cdiv(rows, BM) - first, GROUP)
    m0 = (first + pid % (GROUP * across) % size) * BM
    n0 = pid % (GROUP * across) // size * BN
    acc = tl.zeros((BM, BN), tl.int32)
    for k in range(0, K, BK):
        acc = tl.dot(x.load([m0, k]), weight.load([n0, k]).T, acc, out_dtype=tl.int32)
    m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    real = m < rows
    v = acc.to(tl.float32) * tl.load(scales + m, mask=real, other=0.0)[:, None] * tl.load(columns + n)[None, :]
    v += tl.load(bias + n).to(tl.float32)[None, :]
    if PAIRS:
        gate, value = tl.split(tl.reshape(v, (BM, BN // 2, 2)))
        at = m.to(tl.int64)[:, None] * (N // 2) + (n0 // 2 + tl.arange(0, BN // 2))[None, :]
        tl.store(out + at, _gated(gate, value).to(out.dtype.element_ty), mask=real[:, None])
    else:
        at = out + m0.to(tl.int64) * N + n0 + (tl.arange(0, BM)[:, None] * N + tl.arange(0, BN)[None, :])
        if ADDS:
            v = v * tl.load(scale + n).to(tl.float32)[None, :]
            v += tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
        tl.store(at, v.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["tokens"])
def attended_kernel(q, kv, qkv, out, tokens, scale, HEADS: tl.constexpr, HEAD: tl.constexpr, BM: tl.constexpr,
                    BN: tl.constexpr):  # fmt: skip
    """Attention of BM queries of a head among all tokens of their tile. Weights are 2^(q k scale), not less the row's
    peak: queries and keys are normalised, so that they neither overflow nor vanish. What is NaN becomes 0."""
    blocks = tl.cdiv(tokens, BM)
    head, tile = tl.program_id(0) // blocks % HEADS, tl.program_id(0) // blocks // HEADS
    top, m0, column = tile * tokens, tl.program_id(0) % blocks * BM, head * (3 * HEAD)
    query = q.load([top + m0, column])
    acc, total = tl.zeros((BM, HEAD), tl.float32), tl.zeros((BM,), tl.float32)
    full = tokens // BN * BN
    for n0 in range(0, full, BN):
        weight = tl.exp2(tl.dot(query, kv.load([top + n0, column + HEAD]).T) * scale)
        total += tl.sum(weight, 1)
        acc = tl.dot(weight.to(query.dtype), kv.load([top + n0, column + 2 * HEAD]), acc)
    d, n = tl.arange(0, HEAD), full + tl.arange(0, BN)
    real = n < tokens  # the rows behind are another tile's
    at = qkv + (top + n).to(tl.int64)[:, None] * (HEADS * 3 * HEAD) + (column + HEAD + d)[None, :]
    logits = tl.dot(query, tl.load(at, mask=real[:, None], other=0.0).T)
    weight = tl.where(real[None, :], tl.exp2(logits * scale), 0.0)
    total += tl.sum(weight, 1)
    acc = tl.dot(weight.to(query.dtype), tl.load(at + HEAD, mask=real[:, None], other=0.0), acc)
    acc = acc / total[:, None]
    m = m0 + tl.arange(0, BM)
    at = out + (top + m).to(tl.int64)[:, None] * (HEADS * HEAD) + (head * HEAD + d)[None, :]
    tl.store(at, tl.where(acc == acc, acc, 0.0).to(out.dtype.element_ty), mask=(m < tokens)[:, None])
