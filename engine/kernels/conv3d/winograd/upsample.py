# ruff: noqa: ANN001, ANN201, SIM108
"""The Winograd form of the composed upsamplers: two taps along x, several output phases.

One accumulator sums the middle plane, which both columns of a pair take; then it is both accumulators, and the second
loop adds a plane to each. Phases, folds and the border's bias are those of the direct kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton import finish_tile, multiply
from .triton import columns, inputs, sweep, weights


@triton.jit(do_not_specialize=[
    "slots", "start", "in_slot", "in_plane", "height", "width", "pitch", "row_block", "block_tiles", "frame_tiles",
    "tiles", "first", "drop", "first_row", "last_row", "out_t", "out_y", "out_x", "res_t", "res_y", "res_x",
])
def upsample_kernel(
    a, w, mix, out, res, bias, scale, partials, health, act_scale, gain, offset, low, high,
    slots, start, in_slot, in_plane, height, width, pitch, row_block, block_tiles, frame_tiles, tiles,
    first, drop, first_row, last_row, out_t, out_y, out_x, res_t, res_y, res_x,
    C: tl.constexpr, K: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, PT: tl.constexpr, FOLDED: tl.constexpr,
    MIX: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, SPAN: tl.constexpr,
    CLAMP: tl.constexpr, ROUND: tl.constexpr, HEALTH: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr,
    TMA: tl.constexpr, UPCAST: tl.constexpr, SLICES: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (K + BN - 1) // BN
    N_ALL: tl.constexpr = N_TILES * PT * 4
    WHOLE: tl.constexpr = K % BN == 0
    pid = tl.program_id(0)
    section = pid // (GROUP * N_ALL)
    members = tl.minimum(tiles - section * GROUP, GROUP)
    pid_n = pid % (GROUP * N_ALL) // members
    pid_m = section * GROUP + pid % (GROUP * N_ALL) % members
    phase = pid_n // N_TILES
    n0 = pid_n % N_TILES * BN
    d = pid_m // frame_tiles
    tile = pid_m % frame_tiles
    iy = phase // (2 * PT)
    ix = phase // PT % 2
    it = phase % PT
    group = phase
    if FOLDED:
        fold = tl.minimum(first + d, 2)
        group = fold * (PT * 4) + phase
        if (fold == 0) & (it == 0):  # the clip's first frame has one sub-frame, filed under the second phase
            return

    top = tile // block_tiles * row_block
    q0 = top * pitch + (tile % block_tiles) * BM
    q = q0 + tl.arange(0, BM)
    y = q // pitch
    x = (q - y * pitch) * 2
    keep = (x < width) & (y < tl.minimum(top + row_block, height))
    if TMA:
        rows = q0 + iy * pitch
    else:
        rows = tl.where(keep, q, 0) + iy * pitch

    SUM: tl.constexpr = tl.int32 if ACC == "i32" else tl.float32
    TAPS: tl.constexpr = KT * KH
    STEPS: tl.constexpr = C // BK
    slot0 = start + d
    even = tl.zeros((BM, BN), SUM)
    one_a = tl.full((BM, BK // 32 if ACC == "mx" else 1), 127, tl.uint8)
    one_b = tl.full((BN, BK // 32 if ACC == "mx" else 1), 127, tl.uint8)
    row = (group * 3 + 1) * K
    pointers = w
    if not TMA:
        pointers = columns(w, row, n0, K, TAPS * C, BN, BK)
    for step in range(TAPS * STEPS):
        tap = step // STEPS
        c0 = step % STEPS * BK
        slot = slot0 + tap // KH
        slot = tl.where(slot >= slots, slot - slots, slot)
        at = rows + (slot * in_slot + (1 + ix) * in_plane + tap % KH * pitch)
        v = inputs(a, at, c0, C, BK, TMA, UPCAST)
        u = weights(w, pointers, row + n0, tap * C + c0, TMA, UPCAST)
        even = multiply(v, u, one_a, one_b, even, ACC)
    if MIX:  # in units of the other planes, as in the form of three taps
        n = n0 + tl.arange(0, BN)
        own = tl.load(mix + group * K + n, mask=n < K, other=0.0)
        even = tl.floor(even.to(tl.float32) * own[None, :] + 0.5).to(tl.int32)
    odd = even
    none = tl.zeros((BM, 1), SUM)
    even, odd, none, none = sweep(
        even, odd, none, none, a, w, w, rows, n0, slot0, slots, in_slot, pitch, 3 * ix * in_plane,
        tl.where(ix == 0, 3 * in_plane, 1), group * 3 * K, (group * 3 + 2) * K, K, TAPS, KH, C, 0, STEPS, BK, BN, 0,
        ACC, TMA, UPCAST)  # fmt: skip

    # Offsets are 32-bit within the tile, on 64-bit bases: half the registers, and any tensor size.
    frame = d * PT + it - drop
    y0 = q0 // pitch
    scales = scale + group * K
    biases = bias + (group * 4 * K if BIAS == "border" else phase * K)
    at_row = (y + first_row == iy * last_row).to(tl.float32)
    for side in tl.static_range(2):
        acc = even if side == 0 else odd
        wanted = keep & (x + side < width)
        column = 2 * (x + side) + ix
        line = (frame.to(tl.int64) * out_t + (2 * y0 + iy).to(tl.int64) * out_y) * UNIT
        rows_out = out + line + ((y - y0) * (2 * out_y * UNIT) + column * (out_x * UNIT))
        rows_res = rows_out
        if RESIDUAL:
            line = (frame.to(tl.int64) * res_t + (2 * y0 + iy).to(tl.int64) * res_y) * UNIT
            rows_res = res + line + ((y - y0) * (2 * res_y * UNIT) + column * (res_x * UNIT))
        at_col = (x + side == ix * (width - 1)).to(tl.float32)
        sums = partials
        if SPAN > 0:
            index = ((frame * frame_tiles + tile) * 4 + iy * 2 + ix) * 2 + side
            sums += index.to(tl.int64) * (K // SPAN * 2)
        finish_tile(acc, n0, rows_out, rows_res, wanted, wanted, at_row, at_col, scales, biases, sums, health,
                    act_scale, gain, offset, low, high, K, WHOLE, BIAS, SCALED, RESIDUAL, SPAN, CLAMP, ROUND, HEALTH,
                    SLICES)
