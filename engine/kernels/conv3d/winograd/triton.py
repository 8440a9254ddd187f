# ruff: noqa: ANN001, ANN201, ANN202, SIM108
"""The Winograd form on tensor cores: the direct kernel's loop, twice, with two products a step.

A tile is BM consecutive pairs of columns of one plane. Its taps (t, y) are constant row offsets, so both operands are
plain 2-D tiles again, and no border column is computed. Two accumulators are enough for four planes: the first loop
fills them with m1 and m2, their sum and difference take their place, the second loop adds m0 to the one and m3 to the
other, and they hold the even and the odd columns of the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton import added, multiply, piece, scaled, stored, sum_up


@triton.jit
def columns(w, row, n0, K: tl.constexpr, DEPTH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Pointers to the first BK values of BN weight rows from `row` on."""
    n = n0 + tl.arange(0, BN)
    return w + (row + tl.where(n < K, n, 0)).to(tl.int64)[:, None] * DEPTH + tl.arange(0, BK)[None, :]


@triton.jit
def inputs(a, rows, c0, C: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr):
    if TMA:
        tile = a.load([rows, c0])
    else:
        tile = tl.load(a + rows.to(tl.int64)[:, None] * C + c0 + tl.arange(0, BK)[None, :])
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def weights(w, pointers, row, column, TMA: tl.constexpr, UPCAST: tl.constexpr):
    if TMA:
        tile = w.load([row, column])
    else:
        tile = tl.load(pointers + column)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def sweep(acc_a, acc_b, tail_a, tail_b, a, w, w_tail, rows, n0, slot0, slots, in_slot, in_pitch, at_a, at_b, row_a,
          row_b, K: tl.constexpr, TAPS: tl.constexpr, KH: tl.constexpr, C: tl.constexpr, FIRST: tl.constexpr,
          STEPS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
          TMA: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Products of two planes over STEPS steps of depth BK, from channel FIRST of each tap on, added to their
    accumulators. rows: of the tile's pairs in plane 0, or with TMA of its first one; at_a, at_b: how much further the
    planes lie. row_a, row_b: where the weights of the planes begin."""
    # e8m0 exponent 127 is 1.0: real scales are in the epilogue
    one_a = tl.full((acc_a.shape[0], BK // 32 if ACC == "mx" else 1), 127, tl.uint8)
    one_b = tl.full((BN, BK // 32 if ACC == "mx" else 1), 127, tl.uint8)
    one_tail = tl.full((TAIL if TAIL > 0 else 1, BK // 32 if ACC == "mx" else 1), 127, tl.uint8)
    wa = w
    wb = w
    wa_tail = w_tail
    wb_tail = w_tail
    if not TMA:
        wa = columns(w, row_a, n0, K, TAPS * C, BN, BK)
        wb = columns(w, row_b, n0, K, TAPS * C, BN, BK)
        if TAIL > 0:
            wa_tail = columns(w, row_a, n0 + BN, K, TAPS * C, TAIL, BK)
            wb_tail = columns(w, row_b, n0 + BN, K, TAPS * C, TAIL, BK)
    for step in range(TAPS * STEPS):
        tap = step // STEPS
        c0 = FIRST + (step % STEPS) * BK
        column = tap * C + c0
        slot = slot0 + tap // KH
        slot = tl.where(slot >= slots, slot - slots, slot)
        at = rows + (slot * in_slot + tap % KH * in_pitch)
        va = inputs(a, at + at_a, c0, C, BK, TMA, UPCAST)
        ua = weights(w, wa, row_a + n0, column, TMA, UPCAST)
        vb = inputs(a, at + at_b, c0, C, BK, TMA, UPCAST)
        ub = weights(w, wb, row_b + n0, column, TMA, UPCAST)
        acc_a = multiply(va, ua, one_a, one_b, acc_a, ACC)
        acc_b = multiply(vb, ub, one_a, one_b, acc_b, ACC)
        if TAIL > 0:
            ua = weights(w_tail, wa_tail, row_a + n0 + BN, column, TMA, UPCAST)
            ub = weights(w_tail, wb_tail, row_b + n0 + BN, column, TMA, UPCAST)
            tail_a = multiply(va, ua, one_a, one_tail, tail_a, ACC)
            tail_b = multiply(vb, ub, one_a, one_tail, tail_b, ACC)
    return acc_a, acc_b, tail_a, tail_b


@triton.jit
def _combined(m1, m2, mix, n0, K: tl.constexpr, MIX: tl.constexpr):
    """(m1 + m2, m1 - m2). int8 planes have steps of their own: their sums are brought into units of planes 0 and 3,
    rounded to whole ones, of which any real sum has thousands; so the second loop goes on in int32."""
    if MIX:
        n = n0 + tl.arange(0, m1.shape[1])
        one = m1.to(tl.float32) * tl.load(mix + n, mask=n < K, other=0.0)[None, :]
        two = m2.to(tl.float32) * tl.load(mix + K + n, mask=n < K, other=0.0)[None, :]
        total = tl.floor(one + two + 0.5).to(tl.int32)
        apart = tl.floor(one - two + 0.5).to(tl.int32)
    else:
        total = m1 + m2
        apart = m1 - m2
    return total, apart


@triton.jit
def _finish(even, odd, n0, rows_even, rows_odd, res_even, res_odd, keep, keep_odd, scale, bias, health, act_scale, gain,
            offset, low, high, sums, K: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
            RESIDUAL: tl.constexpr, SPAN: tl.constexpr, CLAMP: tl.constexpr, ROUND: tl.constexpr,
            HEALTH: tl.constexpr):  # fmt: skip
    """The epilogue of one slice [BM, BN] of both columns."""
    BN: tl.constexpr = even.shape[1]
    if RESIDUAL:  # both are loaded before either is stored, which nothing would move a load across
        add_even = added(res_even, n0, keep, BN, K, WHOLE)
        add_odd = added(res_odd, n0, keep_odd, BN, K, WHOLE)
    value = scaled(even, n0, keep, keep, scale, bias, act_scale, K, WHOLE, BIAS, SCALED)
    if RESIDUAL:
        value += add_even.to(tl.float32)
    total, square = stored(value, n0, rows_even, keep, health, gain, offset, low, high, K, WHOLE, RESIDUAL,
                           SPAN, CLAMP, ROUND, HEALTH)
    value = scaled(odd, n0, keep, keep, scale, bias, act_scale, K, WHOLE, BIAS, SCALED)
    if RESIDUAL:
        value += add_odd.to(tl.float32)
    more, more_squares = stored(value, n0, rows_odd, keep_odd, health, gain, offset, low, high, K, WHOLE,
                                RESIDUAL, SPAN, CLAMP, ROUND, HEALTH)
    sum_up(total + more, square + more_squares, sums, n0, BN, K, SPAN)


@triton.jit(do_not_specialize=[
    "slots", "start", "in_slot", "in_plane", "height", "width", "pairs", "row_block", "block_tiles", "frame_tiles",
    "tiles", "out_t", "out_y", "out_x", "res_t", "res_y", "res_x",
])
def winograd_kernel(
    a, w, w_tail, a_rest, w_rest, w_tail_rest, mix, out, res, bias, scale, partials, health, act_scale, gain, offset,
    low, high,
    slots, start, in_slot, in_plane, height, width, pairs, row_block, block_tiles, frame_tiles, tiles,
    out_t, out_y, out_x, res_t, res_y, res_x,
    C: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, MIX: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, RESIDUAL: tl.constexpr, SPAN: tl.constexpr, CLAMP: tl.constexpr, ROUND: tl.constexpr,
    HEALTH: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    SLICES: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr,
    BK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (K + BN + TAIL - 1) // (BN + TAIL)
    WHOLE: tl.constexpr = K % (BN + TAIL) == 0
    pid = tl.program_id(0)
    # GROUP neighbouring tiles share a weight tile before the next one is taken.
    section = pid // (GROUP * N_TILES)
    members = tl.minimum(tiles - section * GROUP, GROUP)
    n0 = pid % (GROUP * N_TILES) // members * (BN + TAIL)
    pid_m = section * GROUP + pid % (GROUP * N_TILES) % members
    d = pid_m // frame_tiles
    tile = pid_m % frame_tiles

    # Pairs of this tile: rows of `pairs`, inside one block of image rows.
    top = tile // block_tiles * row_block
    q0 = top * pairs + (tile % block_tiles) * BM
    q = q0 + tl.arange(0, BM)
    y = q // pairs
    x = (q - y * pairs) * 2
    keep = y < tl.minimum(top + row_block, height)
    if TMA:
        rows = q0
    else:
        rows = tl.where(keep, q, 0)

    SUM: tl.constexpr = tl.int32 if ACC == "i32" else tl.float32
    even = tl.zeros((BM, BN), SUM)
    odd = tl.zeros((BM, BN), SUM)
    even_tail = tl.zeros((BM, TAIL if TAIL > 0 else 1), SUM)
    odd_tail = tl.zeros((BM, TAIL if TAIL > 0 else 1), SUM)
    TAPS: tl.constexpr = KT * KH
    STEPS: tl.constexpr = C // BK
    LEFT: tl.constexpr = (C - STEPS * BK) // REST if REST > 0 else 0
    slot0 = start + d
    even, odd, even_tail, odd_tail = sweep(
        even, odd, even_tail, odd_tail, a, w, w_tail, rows, n0, slot0, slots, in_slot, pairs, in_plane, 2 * in_plane,
        K, 2 * K, K, TAPS, KH, C, 0, STEPS, BK, BN, TAIL, ACC, TMA, UPCAST)
    if REST > 0:
        even, odd, even_tail, odd_tail = sweep(
            even, odd, even_tail, odd_tail, a_rest, w_rest, w_tail_rest, rows, n0, slot0, slots, in_slot, pairs,
            in_plane, 2 * in_plane, K, 2 * K, K, TAPS, KH, C, STEPS * BK, LEFT, REST, BN, TAIL, ACC, TMA, UPCAST)
    even, odd = _combined(even, odd, mix, n0, K, MIX)
    if TAIL > 0:
        even_tail, odd_tail = _combined(even_tail, odd_tail, mix, n0 + BN, K, MIX)
    even, odd, even_tail, odd_tail = sweep(
        even, odd, even_tail, odd_tail, a, w, w_tail, rows, n0, slot0, slots, in_slot, pairs, 0, 3 * in_plane, 0,
        3 * K, K, TAPS, KH, C, 0, STEPS, BK, BN, TAIL, ACC, TMA, UPCAST)
    if REST > 0:
        even, odd, even_tail, odd_tail = sweep(
            even, odd, even_tail, odd_tail, a_rest, w_rest, w_tail_rest, rows, n0, slot0, slots, in_slot, pairs, 0,
            3 * in_plane, 0, 3 * K, K, TAPS, KH, C, STEPS * BK, LEFT, REST, BN, TAIL, ACC, TMA, UPCAST)

    # Offsets are 32-bit within the tile, on 64-bit bases: half the registers, and any tensor size.
    y0 = q0 // pairs
    y -= y0
    line = out + (d.to(tl.int64) * out_t + y0.to(tl.int64) * out_y) * UNIT
    rows_even = line + (y * (out_y * UNIT) + x * (out_x * UNIT))
    rows_odd = rows_even + out_x * UNIT
    res_even = rows_even
    res_odd = rows_odd
    if RESIDUAL:
        line = res + (d.to(tl.int64) * res_t + y0.to(tl.int64) * res_y) * UNIT
        res_even = line + (y * (res_y * UNIT) + x * (res_x * UNIT))
        res_odd = res_even + res_x * UNIT
    keep_odd = keep & (x + 1 < width)
    sums = partials
    if SPAN > 0:
        sums += (d * frame_tiles + tile).to(tl.int64) * (K // SPAN * 2)
    WIDE: tl.constexpr = BN // SLICES
    for part in tl.static_range(SLICES):
        _finish(piece(even, part, SLICES), piece(odd, part, SLICES), n0 + part * WIDE, rows_even, rows_odd, res_even,
                res_odd, keep, keep_odd, scale, bias, health, act_scale, gain, offset, low, high, sums, K, WHOLE, BIAS,
                SCALED, RESIDUAL, SPAN, CLAMP, ROUND, HEALTH)
    if TAIL > 0:
        PIECES: tl.constexpr = TAIL // WIDE if TAIL > WIDE else 1
        for part in tl.static_range(PIECES):
            _finish(piece(even_tail, part, PIECES), piece(odd_tail, part, PIECES), n0 + BN + part * (TAIL // PIECES),
                    rows_even, rows_odd, res_even, res_odd, keep, keep_odd, scale, bias, health, act_scale, gain,
                    offset, low, high, sums, K, WHOLE, BIAS, SCALED, RESIDUAL, SPAN, CLAMP, ROUND, HEALTH)
