# ruff: noqa: ANN001, ANN201, ANN202
"""The loop of `gluon.py` for int8 where taps of a row share positions: these stay in registers from tap to tap.

A warp has neighbouring groups of sixteen rows, and all but the first serve the next tap, too. A tensor of PER rows is
one group of each warp, in a buffer of its own. The next tap's last tensor is the first one's, a warp further: buffers
that serve for it have one more group. Tiles of 128 x 32 for a warp read least of shared memory so: 16 pieces for three
taps, where `gluon.py` reads 24 of tiles of 64 x 64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .arguments import NUMBERS
from .gluon import _base, _buffers, _copies, _finish, _piece, _rows_from, _swizzled, _weights


@gluon.constexpr_function
def _warps_wide(columns, warps):
    return max(min(columns // 32, warps), 1)


@gluon.jit
def _issue(at, step, slot, a, w, rows, end, columns, positions, weights, into: gl.constexpr, slots, in_frame, in_pitch,
           C: gl.constexpr, KH: gl.constexpr, LINES: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr,
           PER: gl.constexpr, SHARE: gl.constexpr, COPIES: gl.constexpr):  # fmt: skip
    """Start the copies of one step, which is `at` (channel and row of the window) in frame `slot`, into one of the
    buffers. What lies behind the end of all steps or of the input is zero. Return where the next step is."""
    R: gl.constexpr = BM // PER
    c0, ky = at
    jump = slot * in_frame + ky * in_pitch
    column = step // (C // BK) * (C * SHARE) + c0
    mask = step < LINES * (C // BK)
    left = gl.where(mask, end - jump, 0)
    here = a + (jump.to(gl.int64) * C + c0)
    depth = gl.arange(0, BK, layout=gl.SliceLayout(0, COPIES))[None, :]
    more = (gl.arange(0, 16, layout=gl.SliceLayout(1, COPIES)) + 1) * (BM // 16)
    for r in gl.static_range(R):
        async_copy.async_copy_global_to_shared(_rows_from(positions[into * R + r], 0, PER, BK, SHARE),
                                               here + r * C + (rows[:, None] * C + depth), (rows + r < left)[:, None])
    for r in gl.static_range(SHARE - 1):
        async_copy.async_copy_global_to_shared(_rows_from(positions[into * R + r], PER // 16, 16, BK, SHARE),
                                               here + r * C + (more[:, None] * C + depth), (more + r < left)[:, None])
    for tap in gl.static_range(SHARE):
        async_copy.async_copy_global_to_shared(weights[into * SHARE + tap], w + (column + tap * C) + columns, mask)
    async_copy.commit_group()
    c0 += BK
    over = c0 >= C
    c0, ky = gl.where(over, 0, c0), gl.where(over, ky + 1, ky)
    over = ky == KH
    ky, slot = gl.where(over, 0, ky), gl.where(over, slot + 1, slot)
    slot = gl.where(slot >= slots, 0, slot)
    return (c0, ky), step + 1, slot


@gluon.jit
def _lefts(buffers, first: gl.constexpr, at: gl.constexpr, KS: gl.constexpr, BK: gl.constexpr, PER: gl.constexpr,
           R: gl.constexpr, COUNT: gl.constexpr, LEFT: gl.constexpr, r: gl.constexpr = 0):  # fmt: skip
    """Load the positions of all taps and one slice of a step into registers, from the buffers from `first` on: R
    tensors for a tap, and one more for each other tap."""
    rows = _rows_from(buffers[first + r % R], r // R, PER, BK, 2)
    one = (rows.slice(at, KS, dim=1).load(LEFT),)
    if r + 1 < COUNT:
        return one + _lefts(buffers, first, at, KS, BK, PER, R, COUNT, LEFT, r + 1)
    else:
        return one


@gluon.jit
def _zeros(M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    one = (gl.zeros([M, N], gl.int32, LAYOUT),)
    if COUNT > 1:
        return one + _zeros(M, N, LAYOUT, COUNT - 1)
    else:
        return one


@gluon.jit
def _products(left, right, sums, tap: gl.constexpr, COUNT: gl.constexpr, r: gl.constexpr = 0):
    """Add a tap's products to COUNT sums."""
    one = (mma_v2(left[tap + r], right, sums[r]),)
    if r + 1 < COUNT:
        return one + _products(left, right, sums, tap, COUNT, r + 1)
    else:
        return one


@gluon.jit
def _stacked(sums, first: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT tensors as one [warps, rows, columns], in which a warp's groups follow each other."""
    if COUNT > 1:
        upper = _stacked(sums, first, COUNT // 2)
        lower = _stacked(sums, first + COUNT // 2, COUNT // 2)
        W: gl.constexpr = upper.shape[0]
        M: gl.constexpr = upper.shape[1]
        N: gl.constexpr = upper.shape[2]
        return gl.reshape(gl.permute(gl.join(upper, lower), (0, 3, 1, 2)), [W, 2 * M, N])
    else:
        M: gl.constexpr = sums[first].shape[0]
        N: gl.constexpr = sums[first].shape[1]
        return gl.reshape(sums[first], [M // 16, 16, N])


@gluon.jit(do_not_specialize=NUMBERS)
def taps_kernel(
    a, w, out, res, bias, scale, partials, health, act_scale, gain, offset, low, high,
    slots, start, in_frame, in_pitch, origin, height, width, pitch, row_block, block_tiles, frame_tiles, tiles,
    first, drop, first_row, last_row, out_t, out_y, out_x, res_t, res_y, res_x,
    C: gl.constexpr, RUN: gl.constexpr, K: gl.constexpr, KT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr,
    ST: gl.constexpr, SH: gl.constexpr, SW: gl.constexpr, PT: gl.constexpr, PY: gl.constexpr, PX: gl.constexpr,
    SHIFTED: gl.constexpr, FOLDED: gl.constexpr, BIAS: gl.constexpr, SCALED: gl.constexpr,
    RESIDUAL: gl.constexpr, SPAN: gl.constexpr, CLAMP: gl.constexpr, ROUND: gl.constexpr, HEALTH: gl.constexpr,
    UNIT: gl.constexpr, ACC: gl.constexpr, SLICES: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, TAIL: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    TURNS: gl.constexpr, LINEAR: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Take the arguments of `mma_kernel`, of which a layer whose taps share positions has no phases and no strides."""
    gl.static_assert(PT * PY * PX * ST * SH * SW * KW == 1 and not SHIFTED and not FOLDED and LINEAR and SHARE > 1)
    gl.static_assert(ACC == "i32" and AHEAD == 1 and TURNS == 1 and TAIL == 0 and RUN == C and C % BK == 0)
    WARPS: gl.constexpr = gl.num_warps()
    N_TILES: gl.constexpr = (K + BN - 1) // BN
    WHOLE: gl.constexpr = K % BN == 0
    pid = gl.program_id(0)
    section = pid // (GROUP * N_TILES)
    members = gl.minimum(tiles - section * GROUP, GROUP)
    n0 = pid % (GROUP * N_TILES) // members * BN
    pid_m = section * GROUP + pid % (GROUP * N_TILES) % members
    d = pid_m // frame_tiles
    tile = pid_m % frame_tiles
    block = tile // block_tiles
    top = block * row_block
    q0 = top * pitch + (tile % block_tiles) * BM
    bottom = gl.minimum(top + row_block, height)

    # Operands of products come in slices of 32 values of depth.
    KS: gl.constexpr = 32
    COPIES: gl.constexpr = _copies(BK, 1, WARPS)
    WIDE: gl.constexpr = _warps_wide(BN, WARPS)
    HIGH: gl.constexpr = WARPS // WIDE
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HIGH, WIDE], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    PER: gl.constexpr = 16 * HIGH
    R: gl.constexpr = BM // PER
    COUNT: gl.constexpr = R + SHARE - 1
    gl.static_assert(SHARE - 1 <= R)
    start_row = q0 + origin
    row = gl.arange(0, PER, layout=gl.SliceLayout(1, COPIES))
    rows = (row & 15) * (BM // 16) + (row >> 4) * R
    depth = gl.arange(0, BK, layout=gl.SliceLayout(0, COPIES))[None, :]
    a_tile = a + start_row.to(gl.int64) * C
    end = slots * in_frame - start_row
    LINES: gl.constexpr = KT * KH
    ROW: gl.constexpr = LINES * SHARE * C
    w_tile = w + n0.to(gl.int64) * ROW
    columns = _weights(n0, depth, BN, K, ROW, WHOLE, COPIES)
    SHARED: gl.constexpr = _swizzled(BK, 1)
    weights = _buffers(gl.int8, [BN, BK], SHARED, STAGES * SHARE)
    positions = _buffers(gl.int8, [HIGH + 1, 16, BK], SHARED, STAGES * R)

    slot = start + d
    slot = gl.where(slot >= slots, slot - slots, slot)
    step = gl.to_tensor(0)
    at = (gl.to_tensor(0), gl.to_tensor(0))
    PARTS: gl.constexpr = SHARE * BK // KS
    for i in gl.static_range(STAGES):
        at, step, slot = _issue(at, step, slot, a_tile, w_tile, rows, end, columns, positions, weights, i, slots,
                                in_frame, in_pitch, C, KH, LINES, BM, BK, PER, SHARE, COPIES)
    async_copy.wait_group(STAGES - 1)
    acc = _zeros(PER, BN, MMA, R)
    for _ in range(0, LINES * (C // BK), STAGES):
        left = _lefts(positions, 0, 0, KS, BK, PER, R, COUNT, LEFT)
        right = weights[0].slice(0, KS, dim=1).permute((1, 0)).load(RIGHT)
        for i in gl.static_range(STAGES):
            for part in gl.static_range(PARTS):
                then_left, then = left, right
                if part + 1 < PARTS:
                    taps = weights[i * SHARE + (part + 1) % SHARE]
                    then = taps.slice((part + 1) // SHARE * KS, KS, dim=1).permute((1, 0)).load(RIGHT)
                    if (part + 1) % SHARE == 0:
                        then_left = _lefts(positions, i * R, (part + 1) // SHARE * KS, KS, BK, PER, R, COUNT, LEFT)
                else:
                    # All have read this buffer, and the next one is there.
                    async_copy.wait_group(STAGES - 2)
                    if i + 1 < STAGES:
                        then = weights[(i + 1) * SHARE].slice(0, KS, dim=1).permute((1, 0)).load(RIGHT)
                        then_left = _lefts(positions, (i + 1) * R, 0, KS, BK, PER, R, COUNT, LEFT)
                    at, step, slot = _issue(at, step, slot, a_tile, w_tile, rows, end, columns, positions, weights, i,
                                            slots, in_frame, in_pitch, C, KH, LINES, BM, BK, PER, SHARE, COPIES)
                acc = _products(left, right, acc, part % SHARE, R)
                left, right = then_left, then
    async_copy.wait_group(0)

    # Offsets are 32-bit within the tile, on 64-bit bases.
    total = gl.reshape(_stacked(acc, 0, R), [BM, BN])
    y0 = q0 // pitch
    to = out + _base(d, y0, gl.to_tensor(0), out_t, out_y, out_x, UNIT)
    residual = res + _base(d, y0, gl.to_tensor(0), res_t, res_y, res_x, UNIT)
    sums = partials
    if SPAN > 0:
        sums += (d * frame_tiles + tile).to(gl.int64) * (K // SPAN * 2)
    for part in gl.static_range(SLICES):
        _finish(_piece(total, part, SLICES), n0 + part * (BN // SLICES), q0, y0, pitch, width, bottom, 0, -first_row,
                to, residual, sums, scale, bias, health, act_scale, gain, offset, low, high, out_y * UNIT,
                out_x * UNIT, res_y * UNIT, res_x * UNIT, K, WHOLE, BIAS, SCALED, RESIDUAL, SPAN, CLAMP, ROUND, HEALTH,
                SHARE)
