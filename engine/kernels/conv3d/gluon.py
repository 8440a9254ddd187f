# ruff: noqa: ANN001, ANN201, ANN202
"""The convolution of `kernels.py` for cards without wgmma and tcgen05, in Triton's lower-level language (Gluon).

Triton's own pipeline reads all operands of a step into registers before it lets the next copy start, and its warps meet
two to five times a step. Here they meet once: copies into one of STAGES buffers are started, and the next operands are
read into registers, while products are made. Buffers are separate allocations, so that the compiler sees that these do
not touch each other, and whole rounds of them make one turn of the loop.

Where SHARE taps of a row share a step's positions, these are read once: rows of a tile lie in groups of sixteen, whose
positions are as far apart as there are groups, so that the rows of the next tap begin one group later.

With stride 1 (LINEAR) a tile is consecutive rows of the padded plane, as with bulk copies: constants tell a thread's
rows apart, and the rows behind the input's end, which lie in the border or behind the tile, are not read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .arguments import NUMBERS


@gluon.constexpr_function
def _warps_wide(columns, warps):
    """Return how many warps lie beside each other: tiles of 64 x 64 for each read least of shared memory."""
    return max(min(columns // 64, warps), 1)


@gluon.constexpr_function
def _copies(depth, itemsize, warps):
    """Return the layout of copies of 16 bytes a thread."""
    each = 16 // itemsize
    across = depth // each
    return gl.BlockedLayout([1, each], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _swizzled(depth, itemsize):
    """Return a layout of shared memory in which neither copies nor ldmatrix have bank conflicts."""
    each, row = 16 // itemsize, depth * itemsize
    return gl.SwizzledSharedLayout(each, max(128 // row, 1), min(row, 128) // 16, [1, 0])


@gluon.constexpr_function
def _rows_of(width, warps):
    """Return the layout of whole rows, 16 bytes of 16-bit values a thread."""
    across = min(max(width // 8, 1), 32)
    return gl.BlockedLayout([1, min(width, 8)], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _shape(rows, depth, share):
    """Return the shape of a buffer; where taps share it, of groups of sixteen rows, with those that others need."""
    return [rows // 16 + share - 1, 16, depth] if share > 1 else [rows, depth]


@gluon.jit
def _buffers(TYPE: gl.constexpr, SHAPE: gl.constexpr, SHARED: gl.constexpr, COUNT: gl.constexpr):
    """Allocate COUNT tiles of shared memory."""
    one = (gl.allocate_shared_memory(TYPE, SHAPE, SHARED),)
    if COUNT > 1:
        return one + _buffers(TYPE, SHAPE, SHARED, COUNT - 1)
    else:
        return one


@gluon.jit
def _order(first: gl.constexpr, COUNT: gl.constexpr, BM: gl.constexpr, SHARE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the positions, counted from the tile's first one, of COUNT rows of its buffer from `first` on."""
    row = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, LAYOUT))
    if SHARE > 1:
        return (row & 15) * (BM // 16) + (row >> 4)
    else:
        return row


@gluon.jit
def _rows_from(buffer, group: gl.constexpr, COUNT: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr):
    """Return COUNT rows of a buffer of positions, from a group on."""
    if SHARE > 1:
        return buffer.index(group)._reinterpret(buffer.dtype, [COUNT, BK], buffer.layout)
    else:
        return buffer


@gluon.jit
def _both(total, square, more, more_squares):
    return total + more, square + more_squares


@gluon.jit
def _weights(n0, depth, N: gl.constexpr, K: gl.constexpr, ROW: gl.constexpr, WHOLE: gl.constexpr,
             COPIES: gl.constexpr):  # fmt: skip
    """Return the offsets of N rows of weights [N, BK]. Where all are real (WHOLE), constants tell them apart."""
    n = gl.arange(0, N, layout=gl.SliceLayout(1, COPIES))
    if not WHOLE:
        n = gl.where(n0 + n < K, n, 0)
    return n[:, None] * ROW + depth


@gluon.jit
def _issue(at, step, slot, a, w, w_tail, rows, end, columns, tail_columns, buffers, into: gl.constexpr, slots, in_frame,
           in_pitch, TAPS: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr, RUN: gl.constexpr,
           CHANNELS: gl.constexpr, STEPS: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, TAIL: gl.constexpr,
           LINEAR: gl.constexpr, SHARE: gl.constexpr, COPIES: gl.constexpr):  # fmt: skip
    """Start the copies of one step, which is `at` (channel, column and row of the window) in frame `slot`, into one of
    the buffers. What lies behind the end of a run, of all steps or of the input is zero. Return where the next step
    is."""
    c0, kx, ky = at
    jump = slot * in_frame + (ky * in_pitch + kx)
    column = step * BK
    mask = step < TAPS * STEPS
    left = gl.where(mask, end - jump, 0)
    if RUN % BK != 0 or SHARE > 1:
        column = step // STEPS * (RUN * SHARE) + c0
    if RUN % BK != 0:
        mask = (mask & (c0 + gl.arange(0, BK, layout=gl.SliceLayout(0, COPIES)) < RUN))[None, :]
    inside = mask
    if LINEAR:
        inside = (_order(0, BM, BM, SHARE, COPIES) < left)[:, None]
        if RUN % BK != 0:
            inside = inside & mask
    here = a + (jump.to(gl.int64) * CHANNELS + c0)
    async_copy.async_copy_global_to_shared(_rows_from(buffers[0][into], 0, BM, BK, SHARE), here + rows, inside)
    if SHARE > 1:
        MORE: gl.constexpr = 16 * (SHARE - 1)
        more = _order(BM, MORE, BM, SHARE, COPIES)
        depth = gl.arange(0, BK, layout=gl.SliceLayout(0, COPIES))[None, :]
        async_copy.async_copy_global_to_shared(_rows_from(buffers[0][into], BM // 16, MORE, BK, SHARE),
                                               here + (more[:, None] * CHANNELS + depth), (more < left)[:, None])
    for tap in gl.static_range(SHARE):
        async_copy.async_copy_global_to_shared(buffers[1][into * SHARE + tap], w + (column + tap * RUN) + columns, mask)
        if TAIL > 0:
            async_copy.async_copy_global_to_shared(buffers[2][into * SHARE + tap],
                                                   w_tail + (column + tap * RUN) + tail_columns, mask)
    async_copy.commit_group()
    c0 += BK
    over = c0 >= RUN
    c0, kx = gl.where(over, 0, c0), gl.where(over, kx + 1, kx)
    over = kx == KW
    kx, ky = gl.where(over, 0, kx), gl.where(over, ky + 1, ky)
    over = ky == KH
    ky, slot = gl.where(over, 0, ky), gl.where(over, slot + 1, slot)
    slot = gl.where(slot >= slots, 0, slot)
    return (c0, kx, ky), step + 1, slot


@gluon.jit
def _fragments(buffers, one: gl.constexpr, part: gl.constexpr, KS: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr,
               TAIL: gl.constexpr, SHARE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):  # fmt: skip
    """Load the operands of one slice of a step from a buffer into registers."""
    tap: gl.constexpr = part // (BK // KS)
    at: gl.constexpr = part % (BK // KS) * KS
    a = _rows_from(buffers[0][one], tap, BM, BK, SHARE).slice(at, KS, dim=1).load(LEFT)
    w = buffers[1][one * SHARE + tap].slice(at, KS, dim=1).permute((1, 0)).load(RIGHT)
    t = buffers[2][one * SHARE + tap].slice(at, KS, dim=1).permute((1, 0)).load(RIGHT) if TAIL > 0 else w
    return a, w, t


@gluon.jit(do_not_specialize=NUMBERS)
def mma_kernel(
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
    WARPS: gl.constexpr = gl.num_warps()
    N_TILES: gl.constexpr = (K + BN + TAIL - 1) // (BN + TAIL)
    WHOLE: gl.constexpr = K % (BN + TAIL) == 0
    N_ALL: gl.constexpr = N_TILES * PT * PY * PX
    pid = gl.program_id(0)
    section = pid // (GROUP * N_ALL)
    members = gl.minimum(tiles - section * GROUP, GROUP)
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
        fold = gl.minimum(first + d, 2)
        if FOLDED > 1:
            group = fold * (PT * PY * PX) + phase
        if (fold == 0) & (it == 0):
            return

    block = tile // block_tiles
    top = block * row_block
    q0 = top * pitch + (tile % block_tiles) * BM
    bottom = gl.minimum(top + row_block, height)
    shift = origin
    if SHIFTED:
        shift += iy * in_pitch + ix

    # Operands of products come in slices of 32 bytes of depth.
    SIZE: gl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
    KS: gl.constexpr = 32 // SIZE
    COPIES: gl.constexpr = _copies(BK, SIZE, WARPS)
    WIDE: gl.constexpr = _warps_wide(BN, WARPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS // WIDE, WIDE], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4 // SIZE)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 4 // SIZE)
    y0 = q0 // pitch
    depth = gl.arange(0, BK, layout=gl.SliceLayout(0, COPIES))[None, :]
    TAPS: gl.constexpr = KT * KH * KW
    if LINEAR:
        start_row = q0 + shift
        rows = _order(0, BM, BM, SHARE, COPIES)[:, None] * C + depth
    else:
        y, x, keep = _positions(q0, pitch, width, bottom, BM, SHARE, COPIES)
        x0 = q0 - y0 * pitch
        start_row = y0 * (SH * in_pitch) + x0 * SW + shift
        rows = gl.where(keep, (y - y0) * (SH * in_pitch) + (x - x0) * SW, 0)[:, None] * C + depth
    a_tile = a + start_row.to(gl.int64) * C
    end = slots * in_frame - start_row - (RUN // C - 1)
    ROW: gl.constexpr = TAPS * SHARE * RUN
    w_tile = w + (group * K + n0).to(gl.int64) * ROW
    w_tail = w_tile + BN * ROW
    columns = _weights(n0, depth, BN, K, ROW, WHOLE, COPIES)
    tail_columns = columns
    if TAIL > 0:
        tail_columns = _weights(n0 + BN, depth, TAIL, K, ROW, WHOLE, COPIES)
    SHARED: gl.constexpr = _swizzled(BK, SIZE)
    TYPE: gl.constexpr = w.dtype.element_ty
    w_buffers = _buffers(TYPE, _shape(BN, BK, 1), SHARED, STAGES * SHARE)
    tail_buffers = _buffers(TYPE, _shape(TAIL, BK, 1), SHARED, STAGES * SHARE) if TAIL > 0 else w_buffers
    buffers = (_buffers(TYPE, _shape(BM, BK, SHARE), SHARED, STAGES), w_buffers, tail_buffers)

    slot = start + d * ST
    slot = gl.where(slot >= slots, slot - slots, slot)
    step = gl.to_tensor(0)
    at = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    STEPS: gl.constexpr = (RUN + BK - 1) // BK
    PARTS: gl.constexpr = SHARE * BK // KS
    for i in gl.static_range(STAGES):
        at, step, slot = _issue(at, step, slot, a_tile, w_tile, w_tail, rows, end, columns, tail_columns, buffers, i,
                                slots, in_frame, in_pitch, TAPS, KH, KW, RUN, C, STEPS, BM, BK, TAIL, LINEAR, SHARE,
                                COPIES)
    async_copy.wait_group(STAGES - 1)
    now = _fragments(buffers, 0, 0, KS, BM, BK, TAIL, SHARE, LEFT, RIGHT)
    SUM: gl.constexpr = gl.int32 if ACC == "i32" else gl.float32
    # Sums in fp16 go into sums of their sums in fp16, too: that takes half the registers and no conversions.
    TOTAL: gl.constexpr = gl.float16 if ACC == "f16" and SIZE == 2 and TAIL == 0 else SUM
    acc = gl.zeros([BM, BN], TOTAL, MMA)
    LAST: gl.constexpr = TAIL if TAIL > 0 else 16
    acc_tail = gl.zeros([BM, LAST], TOTAL, MMA)
    for _ in range(0, TAPS * STEPS, STAGES * TURNS):
        half, half_tail = acc, acc_tail
        if ACC == "f16":
            half, half_tail = gl.zeros([BM, BN], gl.float16, MMA), gl.zeros([BM, LAST], gl.float16, MMA)
        if AHEAD == 1:
            now = _fragments(buffers, 0, 0, KS, BM, BK, TAIL, SHARE, LEFT, RIGHT)
        for i in gl.static_range(STAGES * TURNS):
            for part in gl.static_range(PARTS):
                then = now
                if part + 1 < PARTS:
                    then = _fragments(buffers, i % STAGES, part + 1, KS, BM, BK, TAIL, SHARE, LEFT, RIGHT)
                else:
                    # All have read this buffer, and the next one is there.
                    async_copy.wait_group(STAGES - 2)
                    if AHEAD == 2 or i + 1 < STAGES * TURNS:
                        then = _fragments(buffers, (i + 1) % STAGES, 0, KS, BM, BK, TAIL, SHARE, LEFT, RIGHT)
                    at, step, slot = _issue(at, step, slot, a_tile, w_tile, w_tail, rows, end, columns, tail_columns,
                                            buffers, i % STAGES, slots, in_frame, in_pitch, TAPS, KH, KW, RUN, C, STEPS,
                                            BM, BK, TAIL, LINEAR, SHARE, COPIES)
                half = mma_v2(now[0], now[1], half)
                if TAIL > 0:
                    half_tail = mma_v2(now[0], now[2], half_tail)
                now = then
            if ACC == "f16" and (SIZE == 1 or i + 1 == STAGES * TURNS):
                acc += half.to(TOTAL)
                acc_tail += half_tail.to(TOTAL)
                half, half_tail = gl.zeros([BM, BN], gl.float16, MMA), gl.zeros([BM, LAST], gl.float16, MMA)
        if ACC != "f16":
            acc, acc_tail = half, half_tail
    async_copy.wait_group(0)

    # Offsets are 32-bit within the tile, on 64-bit bases.
    frame = d * PT + it - drop
    line = y0 * PY + iy
    to = out + _base(frame, line, ix, out_t, out_y, out_x, UNIT)
    residual = res + _base(frame, line, ix, res_t, res_y, res_x, UNIT)
    sums = partials
    if SPAN > 0:
        sums += ((frame * frame_tiles + tile) * (PY * PX) + iy * PX + ix).to(gl.int64) * (K // SPAN * 2)
    scales = scale + group * K
    biases = bias + (group * 4 * K if BIAS == "border" else phase * K)
    for part in gl.static_range(SLICES):
        _finish(_piece(acc, part, SLICES), n0 + part * (BN // SLICES), q0, y0, pitch, width, bottom, ix * (width - 1),
                iy * last_row - first_row, to, residual, sums, scales, biases, health, act_scale, gain, offset, low,
                high, out_y * (PY * UNIT), out_x * (PX * UNIT), res_y * (PY * UNIT), res_x * (PX * UNIT), K, WHOLE,
                BIAS, SCALED, RESIDUAL, SPAN, CLAMP, ROUND, HEALTH, SHARE)
    if TAIL > 0:
        _finish(acc_tail, n0 + BN, q0, y0, pitch, width, bottom, ix * (width - 1), iy * last_row - first_row, to,
                residual, sums, scales, biases, health, act_scale, gain, offset, low, high, out_y * (PY * UNIT),
                out_x * (PX * UNIT), res_y * (PY * UNIT), res_x * (PX * UNIT), K, WHOLE, BIAS, SCALED, RESIDUAL, SPAN,
                CLAMP, ROUND, HEALTH, SHARE)


@gluon.jit
def _base(frame, row, column, stride_t, stride_y, stride_x, UNIT: gl.constexpr):
    """Return the 64-bit offset of one position. Strides are in units of UNIT elements."""
    return (frame.to(gl.int64) * stride_t + row.to(gl.int64) * stride_y + column.to(gl.int64) * stride_x) * UNIT


@gluon.jit
def _finish(acc, n0, q0, y0, pitch, width, bottom, edge_x, edge_y, out, res, sums, scales, biases, health, act_scale,
            gain, offset, low, high, out_y, out_x, res_y, res_x, K: gl.constexpr, WHOLE: gl.constexpr,
            BIAS: gl.constexpr, SCALED: gl.constexpr, RESIDUAL: gl.constexpr, SPAN: gl.constexpr, CLAMP: gl.constexpr,
            ROUND: gl.constexpr, HEALTH: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """Finish and store one slice [BM, BN] of the accumulators, and its sums. Values stay where products left them; what
    is read and written goes through shared memory, so that a thread's access is 16 bytes."""
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    HERE: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = _rows_of(BN, gl.num_warps())
    y, x, keep = _positions(q0, pitch, width, bottom, BM, SHARE, ROWS)
    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, HERE))
    wanted = (n < K) | WHOLE
    value = acc.to(gl.float32)
    if SCALED:
        value *= (gl.load(scales + n, mask=wanted, other=0.0) * act_scale)[None, :]
    if BIAS != "none":
        value += gl.load(biases + n, mask=wanted, other=0.0)[None, :]
    here_y, here_x, kept = _positions(q0, pitch, width, bottom, BM, SHARE, HERE)
    if BIAS == "border":
        rows, cols = (here_y == edge_y).to(gl.float32)[:, None], (here_x == edge_x).to(gl.float32)[:, None]
        value += rows * gl.load(biases + K + n, mask=wanted, other=0.0)[None, :]
        value += cols * gl.load(biases + 2 * K + n, mask=wanted, other=0.0)[None, :]
        value += rows * cols * gl.load(biases + 3 * K + n, mask=wanted, other=0.0)[None, :]
    column = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, ROWS))
    mask = keep[:, None] & ((column < K) | WHOLE)[None, :]
    if RESIDUAL:
        more = gl.load(res + (((y - y0) * res_y + x * res_x)[:, None] + column[None, :]), mask=mask, other=0.0)
        value += gl.convert_layout(more, HERE).to(gl.float32)
    if HEALTH:
        # A comparison with NaN is false. Whoever stores, stores the same.
        bad = kept[:, None] & wanted[None, :] & ~(gl.abs(value) < float("inf"))
        one = gl.zeros([BM, BN], gl.int32, HERE)
        gl.store(health + one, gl.full([BM, BN], float("nan"), gl.float32, HERE), mask=bad)
    if CLAMP:
        value = gl.minimum(gl.maximum(value * gain + offset, low), high)
    if ROUND:
        value = (value + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest integer, halves to even
    made = value.to(out.dtype.element_ty)
    where = ((y - y0) * out_y + x * out_x)[:, None] + column[None, :]
    gl.store(out + where, gl.convert_layout(made, ROWS), mask=mask)
    if SPAN > 0:
        NEAR: gl.constexpr = SPAN if SPAN < 2 else 2
        LEFT: gl.constexpr = SPAN // NEAR
        seen = gl.where(kept[:, None], made.to(gl.float32), 0.0)
        seen = gl.reshape(seen, [BM, BN // NEAR, NEAR])
        total, square = gl.reduce((seen, seen * seen), 2, _both)
        total, square = gl.reduce((total, square), 0, _both)
        if LEFT > 1:
            total = gl.reshape(total, [BN // SPAN, LEFT])
            square = gl.reshape(square, [BN // SPAN, LEFT])
            total, square = gl.reduce((total, square), 1, _both)
        span = n0 // SPAN + gl.arange(0, BN // SPAN, layout=total.type.layout)
        gl.store(sums + span * 2, total, mask=span < K // SPAN)
        gl.store(sums + span * 2 + 1, square, mask=span < K // SPAN)


@gluon.jit
def _positions(q0, pitch, width, bottom, BM: gl.constexpr, SHARE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the row and column of a tile's positions, and which of them are in the plane and in this block of rows."""
    q = q0 + _order(0, BM, BM, SHARE, LAYOUT)
    y = q // pitch
    x = q - y * pitch
    return y, x, (x < width) & (y < bottom)


@gluon.jit
def _piece(acc, part: gl.constexpr, SLICES: gl.constexpr):
    """Return one slice of an accumulator's width."""
    if SLICES > 1:
        BM: gl.constexpr = acc.shape[0]
        BN: gl.constexpr = acc.shape[1]
        left, right = gl.split(gl.permute(gl.reshape(acc, [BM, 2, BN // 2]), (0, 2, 1)))
        half = left if part < SLICES // 2 else right
        return _piece(half, part % (SLICES // 2), SLICES // 2)
    else:
        return acc
