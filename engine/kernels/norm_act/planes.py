# ruff: noqa: ANN001, ANN201, ANN202, SIM108
"""Normalise + SiLU + quantise into the planes of a convolution in Winograd form (conv3d/winograd/planes.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..conv3d.triton import formatted
from .triton import activated, vectors


@triton.jit
def _column(base, xx, y_inside, width, x_x, x_c, c, C: tl.constexpr, EDGE: tl.constexpr, UNIT: tl.constexpr,
            DENSE: tl.constexpr):  # fmt: skip
    """Values [BP, CP] of column `xx` of each row as stored, and whether they are part of the frame or copies of it."""
    inside = y_inside
    if EDGE == "zero":
        inside &= (xx >= 0) & (xx < width)
    else:
        if EDGE == "reflect":
            xx = width - 1 - tl.abs(width - 1 - tl.abs(xx))
        xx = tl.minimum(tl.maximum(xx, 0), width - 1)  # a walk may go on behind the border
    if DENSE:
        pointers = base + (xx * (x_x * UNIT))[:, None] + c[None, :]
    else:
        pointers = base + (xx.to(tl.int64) * x_x)[:, None] + c.to(tl.int64)[None, :] * x_c
    return tl.load(pointers, mask=inside[:, None] & (c < C)[None, :], other=0.0), inside


@triton.jit
def _value(raw, inside, c, scale, shift, gain_row, health, eps, gain, limit, C: tl.constexpr, KIND: tl.constexpr,
           WEIGHT: tl.constexpr, BIAS: tl.constexpr, HEALTH: tl.constexpr, GAINS: tl.constexpr, SILU: tl.constexpr,
           CLAMP: tl.constexpr, ROUND: tl.constexpr, ROUNDED: tl.constexpr, HELD: tl.constexpr,
           FAST: tl.constexpr):  # fmt: skip
    """float32, in units of the scale; ROUNDED: as a plain buffer of type HELD holds it."""
    v = activated(raw.to(tl.float32), scale, shift, gain_row, health, eps, C, KIND, WEIGHT, BIAS, HEALTH, GAINS,
                  SILU, FAST)
    v = tl.where(inside[:, None] & (c < C)[None, :], v, 0.0)
    if FAST:  # rounded here, not fused with what follows: a value has the same bits as d0 of one pair and d2 of another
        v = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [v, gain], dtype=tl.float32, is_pure=True,
                                      pack=1)
    else:
        v = v * gain
    if ROUNDED:
        v = formatted(v, 1.0, 0.0, -limit, limit, CLAMP, ROUND).to(HELD).to(tl.float32)
    return v


@triton.jit
def _store(pointers, v, limit, mask, CLAMP: tl.constexpr, ROUND: tl.constexpr):
    tl.store(pointers, formatted(v, 1.0, 0.0, -limit, limit, CLAMP, ROUND).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _store_pair(pointers, plane, d0, d1, d2, d3, limit, mask, CLAMP: tl.constexpr, ROUND: tl.constexpr):
    """The four planes of a pair, `plane` apart, of the columns that it reads."""
    _store(pointers, d0 - d2, limit, mask, CLAMP, ROUND)
    _store(pointers + plane, (d1 + d2) * 0.5, limit, mask, CLAMP, ROUND)
    _store(pointers + 2 * plane, d2 - d1, limit, mask, CLAMP, ROUND)
    _store(pointers + 3 * plane, d3 - d1, limit, mask, CLAMP, ROUND)


@triton.jit(do_not_specialize=["slots", "slot", "height", "width", "first", "rows", "x_t", "x_y", "x_x", "x_c",
                             "plain"])
def planes_kernel(x, coefs, weight, bias, gains, health, out, slots, slot, height, width, first, rows, x_t, x_y, x_x,
                  x_c, eps, gain, limit, plain,
                  C: tl.constexpr, CO: tl.constexpr, CP: tl.constexpr, KIND: tl.constexpr, WEIGHT: tl.constexpr,
                  BIAS: tl.constexpr, HEALTH: tl.constexpr, GAINS: tl.constexpr, SILU: tl.constexpr,
                  EDGE: tl.constexpr, CLAMP: tl.constexpr, ROUND: tl.constexpr, ROUNDED: tl.constexpr,
                  UNIT: tl.constexpr, DENSE: tl.constexpr, FAST: tl.constexpr, WALK: tl.constexpr,
                  BP: tl.constexpr):  # fmt: skip
    """One program writes BP walks of WALK neighbouring pairs each, in the bordered rows `first`.. of one frame. A walk
    reads and activates every column once, but for the two it shares with its neighbours. plain: after a norm over
    channels, the plain bordered frame instead, in columns of these pairs."""
    d = tl.program_id(1)
    pairs = (width + 1) // 2
    walks = (pairs + WALK - 1) // WALK
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    row = p // walks
    j = (p - row * walks) * WALK
    real = row < rows
    y = row + first - 1
    y_inside = real & (y >= 0) & (y < height)
    if EDGE == "reflect":
        y_inside = real
        y = height - 1 - tl.abs(height - 1 - tl.abs(y))
    if EDGE == "replicate":
        y_inside = real
        y = tl.minimum(tl.maximum(y, 0), height - 1)
    c = tl.arange(0, CP)
    HELD: tl.constexpr = out.dtype.element_ty
    scale, shift, gain_row = vectors(coefs, weight, bias, gains, health, d, c, C, KIND, WEIGHT, BIAS, HEALTH, GAINS,
                                     FAST)
    # Rows of the tile relative to its first one: 32-bit offsets on 64-bit bases.
    row0 = tl.program_id(0) * BP // walks
    y0 = tl.minimum(tl.maximum(row0 + first - 1, 0), height - 1)
    base = x + (d.to(tl.int64) * x_t + y0.to(tl.int64) * x_y) * UNIT
    if DENSE:
        lines = base + ((y - y0) * (x_y * UNIT))[:, None]
    else:
        lines = base + ((y - y0).to(tl.int64) * x_y)[:, None]
    at_slot = slot + d
    at_slot = tl.where(at_slot >= slots, at_slot - slots, at_slot)
    plane = (rows * pairs).to(tl.int64) * CO
    start = out + at_slot.to(tl.int64) * 4 * plane + (row0 * pairs).to(tl.int64) * CO
    places = start + (((row - row0) * pairs + j) * CO)[:, None] + c[None, :]
    kept = (c < CO)[None, :] & real[:, None]

    if KIND == "l2" or KIND == "rms":
        # Two columns after two by the same instructions, whatever becomes of them: sums over channels follow a
        # compiled kernel's layout, and this one makes both the planes and the plain frames that they are made of later.
        d0 = tl.zeros((BP, CP), tl.float32)
        d1 = tl.zeros((BP, CP), tl.float32)
        bordered = (at_slot.to(tl.int64) * rows + row0) * (width + 2) * CO
        frame = out + bordered + (((row - row0) * (width + 2) + 2 * j) * CO)[:, None] + c[None, :]
        raw2, inside2 = _column(lines, 2 * j - 1, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
        raw3, inside3 = _column(lines, 2 * j, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
        for i in range(WALK + 1):
            d2 = _value(raw2, inside2, c, scale, shift, gain_row, health, eps, gain, limit, C, KIND, WEIGHT, BIAS,
                        HEALTH, GAINS, SILU, CLAMP, ROUND, ROUNDED, HELD, FAST)
            d3 = _value(raw3, inside3, c, scale, shift, gain_row, health, eps, gain, limit, C, KIND, WEIGHT, BIAS,
                        HEALTH, GAINS, SILU, CLAMP, ROUND, ROUNDED, HELD, FAST)
            xx = 2 * (j + i) - 1
            raw2, inside2 = _column(lines, xx + 2, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
            raw3, inside3 = _column(lines, xx + 3, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
            if plain != 0:
                own = (xx == -1) | (xx == width) | ((i > 0) & (xx < width))
                tl.store(frame + 2 * i * CO, d2.to(HELD), mask=kept & own[:, None])
                own = (xx + 1 == width) | ((i < WALK) & (xx + 1 < width))
                tl.store(frame + (2 * i + 1) * CO, d3.to(HELD), mask=kept & own[:, None])
            elif i > 0:
                mask = kept & (j + i - 1 < pairs)[:, None]
                _store_pair(places + (i - 1) * CO, plane, d0, d1, d2, d3, limit, mask, CLAMP, ROUND)
            d0 = d2
            d1 = d3
    else:
        raw, inside = _column(lines, 2 * j - 1, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
        d0 = _value(raw, inside, c, scale, shift, gain_row, health, eps, gain, limit, C, KIND, WEIGHT, BIAS, HEALTH,
                    GAINS, SILU, CLAMP, ROUND, ROUNDED, HELD, FAST)
        raw, inside = _column(lines, 2 * j, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
        d1 = _value(raw, inside, c, scale, shift, gain_row, health, eps, gain, limit, C, KIND, WEIGHT, BIAS, HEALTH,
                    GAINS, SILU, CLAMP, ROUND, ROUNDED, HELD, FAST)
        raw2, inside2 = _column(lines, 2 * j + 1, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
        raw3, inside3 = _column(lines, 2 * j + 2, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
        for i in tl.static_range(WALK):
            d2 = _value(raw2, inside2, c, scale, shift, gain_row, health, eps, gain, limit, C, KIND, WEIGHT, BIAS,
                        HEALTH, GAINS, SILU, CLAMP, ROUND, ROUNDED, HELD, FAST)
            d3 = _value(raw3, inside3, c, scale, shift, gain_row, health, eps, gain, limit, C, KIND, WEIGHT, BIAS,
                        HEALTH, GAINS, SILU, CLAMP, ROUND, ROUNDED, HELD, FAST)
            if i < WALK - 1:  # the next pair's loads go out before this one's stores, which nothing moves them across
                at = 2 * (j + i) + 3
                raw2, inside2 = _column(lines, at, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
                raw3, inside3 = _column(lines, at + 1, y_inside, width, x_x, x_c, c, C, EDGE, UNIT, DENSE)
            mask = kept & (j + i < pairs)[:, None]
            _store_pair(places + i * CO, plane, d0, d1, d2, d3, limit, mask, CLAMP, ROUND)
            d0 = d2
            d1 = d3
