# ruff: noqa: ANN001, ANN201, ANN202
"""Products of a few rows of tokens with all of a weight: a program reads its rows once.

A norm divides a row by one number, so it follows the product; its weight is part of the product's.

Those called narrow take 8-bit operands. A row of tokens becomes 8-bit codes in registers, in units of its largest
value; a weight's rows have scales of their own. The results of a gate have a scale for each GROUP columns: only a
program that has seen a whole row would know one for all of it."""

from __future__ import annotations

import triton
import triton.language as tl

from .....kernels.conv3d.kernels import dot


@triton.jit
def _rows(x, rows, eps, C: tl.constexpr, BM: tl.constexpr):
    """Return a program's rows of x [R, C], and one over their root mean squares."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, C)
    at = x + m.to(tl.int64)[:, None] * C + c[None, :]
    tile = tl.load(at, mask=(m < rows)[:, None], other=0.0)
    wide = tile.to(tl.float32)
    return tile, tl.rsqrt(tl.sum(wide * wide, 1) / C + eps)


@triton.jit
def _product(tile, weight, n0, UPCAST: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """tile [BM, C] times rows n0 to n0 + BN of weight [N, C]."""
    n, c = n0 + tl.arange(0, BN), tl.arange(0, C)
    part = tl.load(weight + n[:, None] * C + c[None, :])
    return dot(tile, part.T, tl.zeros((BM, BN), tl.float32), UPCAST)


@triton.jit
def _turns(table, row, real, first, height, width, HALF: tl.constexpr, OF_FRAME: tl.constexpr, OF_ROW: tl.constexpr):
    """Return cosines and sines of rows' angles, [rows, HALF]: of OF_FRAME channels by the frame, of the next OF_ROW by
    the row of tokens, of the rest by its column."""
    i = tl.arange(0, HALF)[None, :]
    frame, token = first + row // (height * width), row % (height * width)
    place = tl.where(i < OF_FRAME + OF_ROW, (token // width)[:, None], (token % width)[:, None])
    place = tl.where(i < OF_FRAME, frame[:, None], place)
    at = table + (place * HALF + i) * 2
    return tl.load(at, mask=real, other=0.0), tl.load(at + 1, mask=real, other=0.0)


@triton.jit
def _turned(x, norm, cos, sin, eps, HALF: tl.constexpr):
    """Normalise heads [heads, 2 HALF] and turn neighbouring channels against each other."""
    a, b = tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    i = tl.arange(0, HALF) * 2
    a *= scale * tl.load(norm + i).to(tl.float32)[None, :]
    b *= scale * tl.load(norm + i + 1).to(tl.float32)[None, :]
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (x.shape[0], 2 * HALF))


@triton.jit(do_not_specialize=["rows", "first", "height", "width"])
def turned_kernel(x, bias, norm, table, rows, first, height, width, eps, HEADS: tl.constexpr, HALF: tl.constexpr,
                  TOKEN: tl.constexpr, OF_FRAME: tl.constexpr, OF_ROW: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """BM heads of tokens in place: add the bias, normalise, turn. TOKEN: values from a token to the next."""
    r, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 2 * HALF)
    row, n0 = r // HEADS, r % HEADS * (2 * HALF)
    real = (row < rows)[:, None]
    cos, sin = _turns(table, row, real, first, height, width, HALF, OF_FRAME, OF_ROW)
    at = x + row.to(tl.int64)[:, None] * TOKEN + n0[:, None] + i[None, :]
    wide = tl.load(at, mask=real, other=0.0).to(tl.float32)
    wide += tl.load(bias + n0[:, None] + i[None, :]).to(tl.float32)
    tl.store(at, _turned(wide, norm, cos, sin, eps, HALF).to(x.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows", "first", "height", "width"])
def projected_kernel(x, weight, bias, norms, table, query, keys, rows, first, height, width, eps, C: tl.constexpr,
                     HEADS: tl.constexpr, HALF: tl.constexpr, OF_FRAME: tl.constexpr, OF_ROW: tl.constexpr,
                     FIRST: tl.constexpr, LAST: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Queries [R, C] and keys and values [R, 2 C] of a program's rows, head by head, those from FIRST to LAST. HALF:
    half a head's channels."""
    tile, over = _rows(x, rows, eps, C, BM)
    m, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 2 * HALF)
    real = (m < rows)[:, None]
    cos, sin = _turns(table, m, real, first, height, width, HALF, OF_FRAME, OF_ROW)
    for part in range(FIRST, LAST):
        n0 = part * (2 * HALF)
        made = _product(tile, weight, n0, UPCAST, C, BM, 2 * HALF) * over[:, None]
        made += tl.load(bias + n0 + i).to(tl.float32)[None, :]
        if part < 2 * HEADS:
            made = _turned(made, norms + part // HEADS * (2 * HALF), cos, sin, eps, HALF)
        if part < HEADS:
            where = query + m.to(tl.int64)[:, None] * C + n0 + i[None, :]
        else:
            where = keys + m.to(tl.int64)[:, None] * (2 * C) + n0 - C + i[None, :]
        tl.store(where, made.to(query.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(x, weight, biases, out, rows, eps, C: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr,
                 UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """SiLU of one product times another, [R, D]. Rows of the weight [2 D, C] and biases [2 D] are of both in turn."""
    tile, over = _rows(x, rows, eps, C, BM)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    where = out + m.to(tl.int64)[:, None] * D + tl.arange(0, BN // 2)[None, :]
    for i in range(0, 2 * D // BN):
        # Programs that run at once read different parts of the weight.
        n0 = (tl.program_id(0) + i) % (2 * D // BN) * BN
        made = _product(tile, weight, n0, UPCAST, C, BM, BN) * over[:, None]
        if BIASED:
            made += tl.load(biases + n0 + n).to(tl.float32)[None, :]
        g, u = tl.split(tl.reshape(made, (BM, BN // 2, 2)))
        # A root and its square take fewer instructions than a quotient. SiLU is 0 at -inf, where its product is NaN.
        root = tl.rsqrt(1.0 + tl.exp2(g * -1.4426950408889634))
        silu = tl.where(g == float("-inf"), 0.0, g * root * root)
        tl.store(where + n0 // 2, (silu * u).to(out.dtype.element_ty), mask=(m < rows)[:, None])


@triton.jit
def _summed(acc, y, weight, m, real, n, UPCAST: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    k = tl.arange(0, BK)
    left = y + m.to(tl.int64)[:, None] * K + k[None, :]
    right = weight + n[:, None] * K + k[None, :]
    for k0 in range(0, K, BK):
        acc = dot(tl.load(left + k0, mask=real, other=0.0), tl.load(right + k0).T, acc, UPCAST)
    return acc


@triton.jit(do_not_specialize=["rows"])
def added_kernel(x, y, weight, bias, more, weights, rows, C: tl.constexpr, K: tl.constexpr, MORE: tl.constexpr,
                 BIASED: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr):  # fmt: skip
    """x [R, C] += y [R, K] times weight [C, K], plus the bias, plus more [R, MORE] times weights [C, MORE]."""
    columns: tl.constexpr = C // BN
    m = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    n = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    real = (m < rows)[:, None]
    acc = _summed(tl.zeros((BM, BN), tl.float32), y, weight, m, real, n, UPCAST, K, BK)
    if MORE > 0:
        acc = _summed(acc, more, weights, m, real, n, UPCAST, MORE, BK)
    if BIASED:
        acc += tl.load(bias + n).to(tl.float32)[None, :]
    at = x + m.to(tl.int64)[:, None] * C + n[None, :]
    acc += tl.load(at, mask=real, other=0.0).to(tl.float32)
    tl.store(at, acc.to(x.dtype.element_ty), mask=real)


@triton.jit
def _coded(values, TYPE: tl.constexpr, LIMIT: tl.constexpr):
    """Return rows of fp32 values as codes, whose largest is LIMIT, and the rows' scales: NaN where a value is not
    finite, because a maximum alone passes over NaN on a GPU. 127: whole numbers."""
    largest = tl.max(tl.where(values == values, tl.abs(values), float("inf")), 1)
    scale = tl.where(largest < float("inf"), tl.maximum(largest / LIMIT, 1e-12), float("nan"))
    values = tl.minimum(tl.maximum(values * (1.0 / scale)[:, None], -LIMIT), LIMIT)
    if LIMIT == 127:
        values = tl.floor(values + 0.5)
    return values.to(TYPE), scale


@triton.jit
def _multiplied(x, y, UPCAST: tl.constexpr):
    """Return x [BM, K] times y [BN, K] in fp32."""
    if UPCAST:
        made = tl.dot(x.to(tl.float32), y.to(tl.float32).T)
    elif x.dtype == tl.int8:
        made = tl.dot(x, y.T, out_dtype=tl.int32).to(tl.float32)
    else:
        made = tl.dot(x, y.T)
    return made


@triton.jit
def _made(tile, scale, weight, columns, n0, UPCAST: tl.constexpr, C: tl.constexpr, BN: tl.constexpr):
    """Return the product of codes [BM, C] with rows n0 to n0 + BN of weight [N, C], times the scales of both."""
    n, c = n0 + tl.arange(0, BN), tl.arange(0, C)
    part = tl.load(weight + n[:, None] * C + c[None, :])
    return _multiplied(tile, part, UPCAST) * scale[:, None] * tl.load(columns + n)[None, :]


@triton.jit(do_not_specialize=["rows", "first", "height", "width"])
def narrow_projected_kernel(x, weight, columns, bias, norms, table, query, keys, rows, first, height, width, eps,
                            C: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, OF_FRAME: tl.constexpr,
                            OF_ROW: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, LIMIT: tl.constexpr,
                            UPCAST: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Compute what `projected_kernel` does."""
    tile, over = _rows(x, rows, eps, C, BM)
    tile, scale = _coded(tile.to(tl.float32), weight.dtype.element_ty, LIMIT)
    scale *= over
    m, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 2 * HALF)
    real = (m < rows)[:, None]
    cos, sin = _turns(table, m, real, first, height, width, HALF, OF_FRAME, OF_ROW)
    for part in range(FIRST, LAST):
        n0 = part * (2 * HALF)
        made = _made(tile, scale, weight, columns, n0, UPCAST, C, 2 * HALF)
        made += tl.load(bias + n0 + i).to(tl.float32)[None, :]
        if part < 2 * HEADS:
            made = _turned(made, norms + part // HEADS * (2 * HALF), cos, sin, eps, HALF)
        if part < HEADS:
            where = query + m.to(tl.int64)[:, None] * C + n0 + i[None, :]
        else:
            where = keys + m.to(tl.int64)[:, None] * (2 * C) + n0 - C + i[None, :]
        tl.store(where, made.to(query.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def narrow_gated_kernel(x, weight, columns, biases, out, scales, rows, eps, C: tl.constexpr, D: tl.constexpr,
                        BIASED: tl.constexpr, GROUP: tl.constexpr, LIMIT: tl.constexpr, UPCAST: tl.constexpr,
                        BM: tl.constexpr):  # fmt: skip
    """Compute what `gated_kernel` does, into codes [R, D] and scales [R, D / GROUP]."""
    tile, over = _rows(x, rows, eps, C, BM)
    tile, scale = _coded(tile.to(tl.float32), weight.dtype.element_ty, LIMIT)
    scale *= over
    first, m, n = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM), tl.arange(0, 2 * GROUP)
    real = m < rows - tl.program_id(0) * BM
    out, scales = out + first * D, scales + first * (D // GROUP)
    where = m[:, None] * D + tl.arange(0, GROUP)[None, :]
    for i in range(0, D // GROUP):
        # Programs that run at once read different parts of the weight.
        group = (tl.program_id(0) + i) % (D // GROUP)
        made = _made(tile, scale, weight, columns, group * (2 * GROUP), UPCAST, C, 2 * GROUP)
        if BIASED:
            made += tl.load(biases + group * (2 * GROUP) + n).to(tl.float32)[None, :]
        g, u = tl.split(tl.reshape(made, (BM, GROUP, 2)))
        # A root and its square take fewer instructions than a quotient. SiLU is 0 at -inf, where its product is NaN.
        root = tl.rsqrt(1.0 + tl.exp2(g * -1.4426950408889634))
        silu = tl.where(g == float("-inf"), 0.0, g * root * root)
        codes, found = _coded(silu * u, out.dtype.element_ty, LIMIT)
        tl.store(out + group * GROUP + where, codes, mask=real[:, None])
        tl.store(scales + group + m * (D // GROUP), found, mask=real)


@triton.jit(do_not_specialize=["rows"])
def narrow_added_kernel(x, y, scales, weight, columns, bias, more, weights, rows, C: tl.constexpr, K: tl.constexpr,
                        GROUP: tl.constexpr, MORE: tl.constexpr, BIASED: tl.constexpr, UPCAST: tl.constexpr,
                        UPCAST_MORE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Compute what `added_kernel` does, of codes y [R, K] with scales [R, K / GROUP]; `more` is in 16 bit."""
    across: tl.constexpr = C // BN
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    n, k = tl.program_id(0) % across * BN + tl.arange(0, BN), tl.arange(0, GROUP)
    real = (m < rows)[:, None]
    left = y + m.to(tl.int64)[:, None] * K + k[None, :]
    right = weight + n[:, None] * K + k[None, :]
    each = scales + m.to(tl.int64) * (K // GROUP)
    acc = tl.zeros((BM, BN), tl.float32)
    for group in range(0, K // GROUP):
        codes = tl.load(left + group * GROUP, mask=real, other=0.0)
        scale = tl.load(each + group, mask=m < rows, other=0.0)
        acc += _multiplied(codes, tl.load(right + group * GROUP), UPCAST) * scale[:, None]
    acc *= tl.load(columns + n)[None, :]
    if MORE > 0:
        acc = _summed(acc, more, weights, m, real, n, UPCAST_MORE, MORE, BK)
    if BIASED:
        acc += tl.load(bias + n).to(tl.float32)[None, :]
    at = x + m.to(tl.int64)[:, None] * C + n[None, :]
    acc += tl.load(at, mask=real, other=0.0).to(tl.float32)
    tl.store(at, acc.to(x.dtype.element_ty), mask=real)
