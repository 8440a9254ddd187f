# ruff: noqa: ANN001, ANN201, ANN202, SIM108
"""Implicit-GEMM convolution over a bordered buffer.

Seen as rows [frames * Hp * Wp, C], a tile of output positions is BM consecutive rows of one padded plane and every tap
is a constant row offset. With bulk tensor copies (TMA) both operands are plain 2-D tiles; border rows are computed and
not stored. The pointer form gathers rows instead, wastes none and takes any stride.

A tap's depth (RUN) is its C channels or, where steps of BK do not divide those, the C * KW channels of the taps of one
row: neighbouring positions lie behind each other, so three taps of 96 channels are one run of 288. What is left of a
run behind its last whole step is done at the end, in steps of REST.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import NUMBERS


@triton.jit
def dot(x, y, acc, UPCAST: tl.constexpr):
    """acc + x @ y. UPCAST: in fp32, for Triton's interpreter."""
    if UPCAST:
        acc = tl.dot(x.to(tl.float32), y.to(tl.float32), acc)
    else:
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def formatted(x, gain, offset, low, high, CLAMP: tl.constexpr, ROUND: tl.constexpr):
    """float32 in real units -> float32 ready for the cast into the output type (types.Pixels)."""
    if CLAMP:
        x = tl.minimum(tl.maximum(x * gain + offset, low), high)
    if ROUND:
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest integer, halves to even
    return x


@triton.jit
def note(health, sizes, mask):
    """NaN into `health` if one of the sizes [n] is not finite: whoever stores, stores the same."""
    # A comparison with NaN is false.
    tl.store(health + tl.zeros(sizes.shape, tl.int32), float("nan"), mask=mask & ~(sizes < float("inf")))


@triton.jit
def _base(frame, row, column, stride_t, stride_y, stride_x, UNIT: tl.constexpr):
    """64-bit offset of one position. Strides come in units of 16 elements where they allow it, which tells the
    compiler that accesses are aligned."""
    offset = frame.to(tl.int64) * stride_t + row.to(tl.int64) * stride_y + column.to(tl.int64) * stride_x
    return offset * UNIT


@triton.jit
def piece(acc, part: tl.constexpr, SLICES: tl.constexpr):
    """One slice of an accumulator's width: the whole tile at once would not fit the registers beside it."""
    if SLICES > 1:
        BM: tl.constexpr = acc.shape[0]
        BN: tl.constexpr = acc.shape[1]
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        half = left if part < SLICES // 2 else right
        return piece(half, part % (SLICES // 2), SLICES // 2)
    else:
        return acc


@triton.jit
def _both(total, square, more, more_squares):
    return total + more, square + more_squares


@triton.jit
def scaled(acc, n0, at_row, at_col, scales, biases, act_scale, K: tl.constexpr, WHOLE: tl.constexpr,
           BIAS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """One slice [BM, BN] of the accumulator in real units, with its bias. WHOLE: all columns are real."""
    n = n0 + tl.arange(0, acc.shape[1])
    wanted = (n < K) | WHOLE
    value = acc.to(tl.float32)
    if SCALED:
        value *= (tl.load(scales + n, mask=wanted, other=0.0) * act_scale)[None, :]
    if BIAS != "none":
        value += tl.load(biases + n, mask=wanted, other=0.0)[None, :]
    if BIAS == "border":
        rows, cols = at_row[:, None], at_col[:, None]
        value += rows * tl.load(biases + K + n, mask=wanted, other=0.0)[None, :]
        value += cols * tl.load(biases + 2 * K + n, mask=wanted, other=0.0)[None, :]
        value += rows * cols * tl.load(biases + 3 * K + n, mask=wanted, other=0.0)[None, :]
    return value


@triton.jit
def added(res_rows, n0, keep, BN: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """The residual of one slice [BM, BN]."""
    n = n0 + tl.arange(0, BN)
    mask = keep[:, None]
    if not WHOLE:
        mask &= (n < K)[None, :]
    return tl.load(res_rows[:, None] + n[None, :], mask=mask, other=0.0)


@triton.jit
def stored(value, n0, out_rows, keep, health, gain, offset, low, high, K: tl.constexpr, WHOLE: tl.constexpr,
           RESIDUAL: tl.constexpr, SPAN: tl.constexpr, CLAMP: tl.constexpr, ROUND: tl.constexpr,
           HEALTH: tl.constexpr):  # fmt: skip
    """Cast and store positions `keep` of one slice [BM, BN]. Returns what `sum_up` adds of each position: sums over
    neighbouring columns, and of squares."""
    BM: tl.constexpr = value.shape[0]
    BN: tl.constexpr = value.shape[1]
    n = n0 + tl.arange(0, BN)
    mask = keep[:, None]
    if not WHOLE:
        mask &= (n < K)[None, :]
    if HEALTH:
        note(health, tl.sum(tl.where(mask, tl.abs(value), 0.0), 1), True)
    made = formatted(value, gain, offset, low, high, CLAMP, ROUND).to(out_rows.dtype.element_ty)
    tl.store(out_rows[:, None] + n[None, :], made, mask=mask)
    if SPAN > 0:
        # What a thread holds is added first, which leaves little to choose among and to exchange: whole rows of columns
        # where a residual was loaded, pairs as products leave them.
        NEAR: tl.constexpr = SPAN if RESIDUAL or SPAN < 2 else 2
        seen = tl.reshape(made.to(tl.float32), (BM, BN // NEAR, NEAR))
        total, square = tl.reduce((seen, seen * seen), 2, _both)
        return tl.where(keep[:, None], total, 0.0), tl.where(keep[:, None], square, 0.0)
    else:
        return value, value


@triton.jit
def _finish(acc, n0, out_rows, res_rows, keep, at_row, at_col, scales, biases, health, act_scale, gain, offset, low,
            high, K: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
            RESIDUAL: tl.constexpr, SPAN: tl.constexpr, CLAMP: tl.constexpr, ROUND: tl.constexpr,
            HEALTH: tl.constexpr):  # fmt: skip
    """The epilogue of one slice: `scaled`, with its residual, `stored`."""
    value = scaled(acc, n0, at_row, at_col, scales, biases, act_scale, K, WHOLE, BIAS, SCALED)
    if RESIDUAL:
        value += added(res_rows, n0, keep, acc.shape[1], K, WHOLE).to(tl.float32)
    return stored(value, n0, out_rows, keep, health, gain, offset, low, high, K, WHOLE, RESIDUAL, SPAN, CLAMP, ROUND,
                  HEALTH)


@triton.jit
def sum_up(total, square, sums, n0, BN: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr):
    """Both sums over the positions of a tile, stored for every SPAN of the slice's BN columns. Both at once: its warps,
    whose next products wait, meet half as often."""
    if SPAN > 0:
        LEFT: tl.constexpr = SPAN * total.shape[1] // BN
        total, square = tl.reduce((total, square), 0, _both)
        if LEFT > 1:
            total = tl.reshape(total, (BN // SPAN, LEFT))
            square = tl.reshape(square, (BN // SPAN, LEFT))
            total, square = tl.reduce((total, square), 1, _both)
        column = n0 // SPAN + tl.arange(0, BN // SPAN)
        tl.store(sums + column * 2, total, mask=column < K // SPAN)
        tl.store(sums + column * 2 + 1, square, mask=column < K // SPAN)


@triton.jit
def multiply(at, bt, one_a, one_b, acc, ACC: tl.constexpr):
    """acc + at @ bt.T"""
    if ACC == "f32":
        acc = tl.dot(at, bt.T, acc)
    elif ACC == "i32":
        acc = tl.dot(at, bt.T, acc, out_dtype=tl.int32)
    elif ACC == "f16":  # fp16 inside the step only: full-depth fp16 costs a decimal digit
        acc += tl.dot(at, bt.T, out_dtype=tl.float16)
    else:
        acc = tl.dot_scaled(at, one_a, "e4m3", bt.T, one_b, "e4m3", acc)
    return acc


@triton.jit
def _sweep(acc, acc_tail, a, w, w_tail, rows, n0, group, slot0, slots, in_frame, in_pitch,
           K: tl.constexpr, TAPS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RUN: tl.constexpr,
           CHANNELS: tl.constexpr, FIRST: tl.constexpr, STEPS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
           TAIL: tl.constexpr, ACC: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """The products of STEPS steps of depth BK, from depth FIRST of each tap's RUN on, added to both accumulators. rows:
    of the tile's positions, or with TMA of its first one."""
    # e8m0 exponent 127 is 1.0: real scales are in the epilogue
    one_a = tl.full((acc.shape[0], BK // 32 if ACC == "mx" else 1), 127, tl.uint8)
    one_b = tl.full((BN, BK // 32 if ACC == "mx" else 1), 127, tl.uint8)
    one_tail = tl.full((TAIL if TAIL > 0 else 1, BK // 32 if ACC == "mx" else 1), 127, tl.uint8)
    if not TMA:
        depth = tl.arange(0, BK)
        n = n0 + tl.arange(0, BN)
        w_ptrs = w + (group * K + tl.where(n < K, n, 0)).to(tl.int64)[:, None] * (TAPS * RUN) + depth[None, :]
        if TAIL > 0:
            n = n0 + BN + tl.arange(0, TAIL)
            tail_ptrs = w + (group * K + tl.where(n < K, n, 0)).to(tl.int64)[:, None] * (TAPS * RUN)
            tail_ptrs += depth[None, :]
    for step in range(TAPS * STEPS):
        tap = step // STEPS
        c0 = FIRST + (step % STEPS) * BK
        column = tap * RUN + c0
        slot = slot0 + tap // (KH * KW)
        slot = tl.where(slot >= slots, slot - slots, slot)
        jump = slot * in_frame + (tap // KW % KH) * in_pitch + tap % KW
        if TMA:
            at = a.load([rows + jump, c0])
            bt = w.load([group * K + n0, column])
        else:
            at = tl.load(a + (rows + jump).to(tl.int64)[:, None] * CHANNELS + c0 + depth[None, :])
            bt = tl.load(w_ptrs + column)
        if UPCAST:  # Triton's interpreter multiplies bf16 and fp8 wrongly (3.6.0 and 3.9.0)
            at = at.to(tl.float32)
            bt = bt.to(tl.float32)
        acc = multiply(at, bt, one_a, one_b, acc, ACC)
        if TAIL > 0:
            if TMA:
                bt_tail = w_tail.load([group * K + n0 + BN, column])
            else:
                bt_tail = tl.load(tail_ptrs + column)
            if UPCAST:
                bt_tail = bt_tail.to(tl.float32)
            acc_tail = multiply(at, bt_tail, one_a, one_tail, acc_tail, ACC)
    return acc, acc_tail


@triton.jit(do_not_specialize=NUMBERS)
def conv_kernel(
    a, w, w_tail, a_rest, w_rest, w_tail_rest, out, res, bias, scale, partials, health, act_scale, gain, offset, low,
    high,
    slots, start, in_frame, in_pitch, origin, height, width, pitch, row_block, block_tiles, frame_tiles, tiles,
    first, drop, first_row, last_row, out_t, out_y, out_x, res_t, res_y, res_x,
    C: tl.constexpr, RUN: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ST: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PT: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    SHIFTED: tl.constexpr, FOLDED: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr, SPAN: tl.constexpr, CLAMP: tl.constexpr, ROUND: tl.constexpr, HEALTH: tl.constexpr,
    UNIT: tl.constexpr, ACC: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, SLICES: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (K + BN + TAIL - 1) // (BN + TAIL)
    WHOLE: tl.constexpr = K % (BN + TAIL) == 0
    N_ALL: tl.constexpr = N_TILES * PT * PY * PX
    pid = tl.program_id(0)
    # GROUP neighbouring tiles share a weight tile before the next one is taken: with the eight phases of a composed
    # upsample the weights are larger than half of the L2 cache. The order never changes a result.
    section = pid // (GROUP * N_ALL)
    members = tl.minimum(tiles - section * GROUP, GROUP)
    pid_n = pid % (GROUP * N_ALL) // members
    pid_m = section * GROUP + pid % (GROUP * N_ALL) % members
    phase = pid_n // N_TILES
    n0 = (pid_n % N_TILES) * (BN + TAIL)
    d = pid_m // frame_tiles
    tile = pid_m % frame_tiles
    iy = phase // (PX * PT)
    ix = (phase // PT) % PX
    it = phase % PT
    group = phase
    if FOLDED > 0:
        fold = tl.minimum(first + d, 2)
        if FOLDED > 1:
            group = fold * (PT * PY * PX) + phase
        if (fold == 0) & (it == 0):  # the clip's first frame has one sub-frame, filed under the second phase
            return

    # Positions of this tile: rows of `pitch` positions, inside one block of image rows.
    block = tile // block_tiles
    top = block * row_block
    q0 = top * pitch + (tile % block_tiles) * BM
    q = q0 + tl.arange(0, BM)
    y = q // pitch
    x = q - y * pitch
    keep = (x < width) & (y < tl.minimum(top + row_block, height))

    shift = origin
    if SHIFTED:
        shift += iy * in_pitch + ix
    if TMA:
        rows = shift + q0
    else:
        rows = tl.where(keep, y * SH * in_pitch + x * SW + shift, 0)
    SUM: tl.constexpr = tl.int32 if ACC == "i32" else tl.float32
    acc = tl.zeros((BM, BN), SUM)
    acc_tail = tl.zeros((BM, TAIL if TAIL > 0 else 1), SUM)
    TAPS: tl.constexpr = KT * KH * KW
    STEPS: tl.constexpr = RUN // BK
    acc, acc_tail = _sweep(acc, acc_tail, a, w, w_tail, rows, n0, group, start + d * ST, slots, in_frame, in_pitch,
                           K, TAPS, KH, KW, RUN, C, 0, STEPS, BK, BN, TAIL, ACC, TMA, UPCAST)
    if REST > 0:
        acc, acc_tail = _sweep(acc, acc_tail, a_rest, w_rest, w_tail_rest, rows, n0, group, start + d * ST, slots,
                               in_frame, in_pitch, K, TAPS, KH, KW, RUN, C, STEPS * BK, (RUN - STEPS * BK) // REST,
                               REST, BN, TAIL, ACC, TMA, UPCAST)

    # Offsets are 32-bit within the tile, on 64-bit bases: half the registers, and any tensor size.
    frame = d * PT + it - drop
    y0 = q0 // pitch
    base = _base(frame, y0 * PY + iy, ix, out_t, out_y, out_x, UNIT)
    out_rows = out + base + ((y - y0) * (out_y * (PY * UNIT)) + x * (out_x * (PX * UNIT)))
    res_rows = out_rows
    if RESIDUAL:
        base = _base(frame, y0 * PY + iy, ix, res_t, res_y, res_x, UNIT)
        res_rows = res + base + ((y - y0) * (res_y * (PY * UNIT)) + x * (res_x * (PX * UNIT)))
    at_row = (y + first_row == iy * last_row).to(tl.float32)
    at_col = (x == ix * (width - 1)).to(tl.float32)
    scales = scale + group * K
    biases = bias + (group * 4 * K if BIAS == "border" else phase * K)
    index = ((frame * frame_tiles + tile) * (PY * PX) + iy * PX + ix).to(tl.int64)
    sums = partials
    if SPAN > 0:
        sums += index * (K // SPAN * 2)

    WIDE: tl.constexpr = BN // SLICES
    for part in tl.static_range(SLICES):
        n1 = n0 + part * WIDE
        total, square = _finish(piece(acc, part, SLICES), n1, out_rows, res_rows, keep, at_row, at_col, scales,
                                biases, health, act_scale, gain, offset, low, high, K, WHOLE, BIAS, SCALED, RESIDUAL,
                                SPAN, CLAMP, ROUND, HEALTH)
        sum_up(total, square, sums, n1, WIDE, K, SPAN)
    if TAIL > 0:
        # Sums need registers, too.
        NARROW: tl.constexpr = TAIL // 2 if TAIL > 64 and SPAN > 0 and SPAN <= TAIL // 2 else TAIL
        for part in tl.static_range(TAIL // NARROW):
            n1 = n0 + BN + part * NARROW
            total, square = _finish(piece(acc_tail, part, TAIL // NARROW), n1, out_rows, res_rows, keep, at_row,
                                    at_col, scales, biases, health, act_scale, gain, offset, low, high, K, WHOLE, BIAS,
                                    SCALED, RESIDUAL, SPAN, CLAMP, ROUND, HEALTH)
            sum_up(total, square, sums, n1, NARROW, K, SPAN)
