# ruff: noqa: ANN001, ANN201, ANN202, SIM108
"""Memory-bound passes: statistics, their reduction to coefficients, and normalise + SiLU + quantise + border."""

from __future__ import annotations

import triton
import triton.language as tl

from ..conv3d.kernels import formatted, note


@triton.jit(do_not_specialize=["height", "width", "x_t", "x_y", "x_x"])
def statistics_kernel(x, partials, height, width, x_t, x_y, x_x,
                      C: tl.constexpr, CP: tl.constexpr, SPAN: tl.constexpr, UNIT: tl.constexpr,
                      ROWS: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """One program sums ROWS image rows of one frame, channel by channel, then over SPAN channels."""
    block, d = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, CP)
    top = block * ROWS
    base = x + (d.to(tl.int64) * x_t + top.to(tl.int64) * x_y) * UNIT
    # Whole tiles add up in registers; lanes and warps meet once, at the end.
    totals = tl.zeros((BP, CP), tl.float32)
    squares = tl.zeros((BP, CP), tl.float32)
    for p0 in range(0, ROWS * width, BP):
        p = p0 + tl.arange(0, BP)
        row = p // width
        keep = (row < ROWS) & (top + row < height)
        at = row * (x_y * UNIT) + (p - row * width) * (x_x * UNIT)
        v = tl.load(base + at[:, None] + c[None, :], mask=keep[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        totals += v
        squares += v * v
    total = tl.sum(tl.reshape(tl.sum(totals, 0), (CP // SPAN, SPAN)), 1)
    square = tl.sum(tl.reshape(tl.sum(squares, 0), (CP // SPAN, SPAN)), 1)
    column = tl.arange(0, CP // SPAN)
    where = partials + ((d * tl.num_programs(0) + block).to(tl.int64) * (C // SPAN) + column) * 2
    tl.store(where, total, mask=column < C // SPAN)
    tl.store(where + 1, square, mask=column < C // SPAN)


@triton.jit(do_not_specialize=["blocks"])
def coefficients_kernel(partials, weight, bias, coefs, health, blocks, count, eps,
                        C: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, AFFINE: tl.constexpr,
                        HEALTH: tl.constexpr, POOL: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
                        BG: tl.constexpr):  # fmt: skip
    """One program per (group, frame): sums all blocks in fixed order in fp64. POOL: those of all frames together."""
    g, d = tl.program_id(0), tl.program_id(1)
    PER: tl.constexpr = COLUMNS // GROUPS
    j = tl.arange(0, BC)
    total = tl.zeros((BB,), tl.float64)
    square = tl.zeros((BB,), tl.float64)
    first = d * blocks
    if POOL:
        first = d * 0
        blocks *= tl.num_programs(1)
    for b0 in range(0, blocks, BB):
        b = b0 + tl.arange(0, BB)
        at = partials + ((first + b).to(tl.int64)[:, None] * COLUMNS + g * PER + j[None, :]) * 2
        keep = (b < blocks)[:, None] & (j < PER)[None, :]
        total += tl.sum(tl.load(at, mask=keep, other=0.0).to(tl.float64), 1)
        square += tl.sum(tl.load(at + 1, mask=keep, other=0.0).to(tl.float64), 1)
    mean = tl.sum(total, 0) / count
    size = tl.sum(square, 0)
    spread = tl.maximum(size / count - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(spread + eps)
    c = tl.arange(0, BG)
    keep = c < C // GROUPS
    c += g * (C // GROUPS)
    scale = tl.zeros((BG,), tl.float64) + rstd
    if AFFINE:
        scale *= tl.load(weight + c, mask=keep, other=0.0).to(tl.float64)
    shift = -mean * scale
    if AFFINE:
        shift += tl.load(bias + c, mask=keep, other=0.0).to(tl.float64)
    scale = scale.to(tl.float32)
    shift = shift.to(tl.float32)
    if HEALTH:
        note(health, (tl.abs(scale) + tl.abs(shift)).to(tl.float64) + (tl.abs(mean) + size), keep)
    tl.store(coefs + d * 2 * C + c, scale, mask=keep)
    tl.store(coefs + d * 2 * C + C + c, shift, mask=keep)


@triton.jit
def _note_in_place(health, sizes, FAST: tl.constexpr):
    """As `note`. FAST: by the threads that hold a size, where a store would bring the sizes into another layout first,
    which takes two barriers more in each program of these kernels."""
    if FAST:
        place = (health + tl.zeros(sizes.shape, tl.int32)).to(tl.int64)
        tl.inline_asm_elementwise("""{
            .reg .pred finite;
            setp.lt.f32 finite, $1, 0f7F800000;
            @!finite st.global.b32 [$2], 0x7FFFFFFF;
            mov.b32 $0, 0;
            }""", "=r,f,l", [sizes, place], dtype=tl.int32, is_pure=False, pack=1)
    else:
        note(health, sizes, True)


@triton.jit
def vectors(coefs, weight, bias, gains, health, d, c, C: tl.constexpr, KIND: tl.constexpr, WEIGHT: tl.constexpr,
            BIAS: tl.constexpr, HEALTH: tl.constexpr, GAINS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """What the channels of a frame are multiplied by, what is added, and the gains behind the activation."""
    scale = tl.full(c.shape, 1.0, tl.float32)
    shift = tl.zeros(c.shape, tl.float32)
    gain = scale
    if KIND == "group":
        scale = tl.load(coefs + d * 2 * C + c, mask=c < C, other=0.0)
        shift = tl.load(coefs + d * 2 * C + C + c, mask=c < C, other=0.0)
    if WEIGHT:
        scale = tl.load(weight + c, mask=c < C, other=0.0)
    if BIAS:
        shift = tl.load(bias + c, mask=c < C, other=0.0)
    if GAINS:
        gain = tl.load(gains + c, mask=c < C, other=0.0)
    if HEALTH and (WEIGHT or BIAS or GAINS):
        _note_in_place(health, tl.abs(scale) + tl.abs(shift) + tl.abs(gain), FAST)
    return scale, shift, gain


@triton.jit
def activated(v, scale, shift, gain, health, eps, C: tl.constexpr, KIND: tl.constexpr, WEIGHT: tl.constexpr,
              BIAS: tl.constexpr, HEALTH: tl.constexpr, GAINS: tl.constexpr, SILU: tl.constexpr,
              FAST: tl.constexpr):  # fmt: skip
    """Positions [P, CP] of float32 values, normalised, activated and times the gains."""
    if KIND == "group":
        v = v * scale[None, :] + shift[None, :]
    else:
        if KIND != "none":
            size = tl.sum(v * v, 1)
        elif HEALTH:
            size = tl.sum(tl.abs(v), 1)
        if HEALTH:  # the sum of a position shows it
            _note_in_place(health, size, FAST)
        if KIND == "l2":
            v *= (tl.sqrt(C * 1.0) / tl.maximum(tl.sqrt(size), eps))[:, None]
        if KIND == "rms":
            v *= (1.0 / tl.sqrt(size / C + eps))[:, None]
        if WEIGHT:
            v *= scale[None, :]
        if BIAS:
            v += shift[None, :]
    if SILU:
        if FAST:  # the hardware's reciprocal (1 ulp): a full division would make this pass compute-bound
            v *= tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + tl.exp(-v)],
                                           dtype=tl.float32, is_pure=True, pack=1)
        else:
            v = v / (1.0 + tl.exp(-v))
    if GAINS:
        v *= gain[None, :]
    return v


@triton.jit(do_not_specialize=["slots", "slot", "height", "width", "first", "rows", "x_t", "x_y", "x_x", "x_c"])
def norm_act_kernel(x, coefs, weight, bias, gains, health, out, slots, slot, height, width, first, rows, x_t, x_y, x_x,
                    x_c, eps, gain, limit,
                    C: tl.constexpr, CO: tl.constexpr, CP: tl.constexpr, KIND: tl.constexpr, WEIGHT: tl.constexpr,
                    BIAS: tl.constexpr, HEALTH: tl.constexpr, GAINS: tl.constexpr, SILU: tl.constexpr,
                    BORDER: tl.constexpr, EDGE: tl.constexpr, CLAMP: tl.constexpr, ROUND: tl.constexpr,
                    UNIT: tl.constexpr, DENSE: tl.constexpr, FAST: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """One program writes BP positions of the bordered rows `first`.. of one frame: [BP, CO], C of them from x."""
    d = tl.program_id(1)
    pitch = width + 2 * BORDER
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    row = p // pitch
    y = row + first - BORDER
    xx = p - row * pitch - BORDER
    real = p < rows * pitch
    inside = real & (y >= 0) & (y < height) & (xx >= 0) & (xx < width)
    if EDGE == "reflect":
        y = height - 1 - tl.abs(height - 1 - tl.abs(y))
        xx = width - 1 - tl.abs(width - 1 - tl.abs(xx))
        inside = real
    if EDGE == "replicate":
        y = tl.minimum(tl.maximum(y, 0), height - 1)
        xx = tl.minimum(tl.maximum(xx, 0), width - 1)
        inside = real
    c = tl.arange(0, CP)
    # Rows of the tile relative to its first one: 32-bit offsets on a 64-bit base.
    y0 = tl.minimum(tl.maximum(tl.program_id(0) * BP // pitch + first - BORDER, 0), height - 1)
    base = x + (d.to(tl.int64) * x_t + y0.to(tl.int64) * x_y) * UNIT
    at = (y - y0) * (x_y * UNIT) + xx * (x_x * UNIT)
    if DENSE:
        ptrs = base + at[:, None] + c[None, :]
    else:
        ptrs = base + at.to(tl.int64)[:, None] + c.to(tl.int64)[None, :] * x_c
    v = tl.load(ptrs, mask=inside[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    scale, shift, gain_row = vectors(coefs, weight, bias, gains, health, d, c, C, KIND, WEIGHT, BIAS, HEALTH, GAINS,
                                     FAST)
    v = activated(v, scale, shift, gain_row, health, eps, C, KIND, WEIGHT, BIAS, HEALTH, GAINS, SILU, FAST)
    v = tl.where(inside[:, None] & (c < C)[None, :], v, 0.0)
    v = formatted(v, gain, 0.0, -limit, limit, CLAMP, ROUND).to(out.dtype.element_ty)
    at_slot = slot + d
    at_slot = tl.where(at_slot >= slots, at_slot - slots, at_slot)
    start = (at_slot.to(tl.int64) * (rows * pitch) + tl.program_id(0) * BP) * CO
    i = tl.arange(0, BP)
    tl.store(out + start + i[:, None] * CO + c[None, :], v, mask=real[:, None] & (c < CO)[None, :])


@triton.jit(do_not_specialize=[
    "slots", "slot", "height", "width", "first", "rows", "x_t", "x_y", "x_x", "each", "columns",
])
def conditioned_kernel(x, coefs, affine, gains, out, slots, slot, height, width, first, rows, x_t, x_y, x_x, each,
                       columns, gain, limit, C: tl.constexpr, CO: tl.constexpr, CP: tl.constexpr, GAINS: tl.constexpr,
                       SILU: tl.constexpr, CLAMP: tl.constexpr, ROUND: tl.constexpr, UNIT: tl.constexpr,
                       FAST: tl.constexpr, BORDER: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """One program writes BP positions of the bordered rows `first`.. of one frame: [BP, CO], C of them from x. A row of
    `affine` [h, columns, 2C] is for `each` x `each` positions."""
    d = tl.program_id(1)
    pitch = width + 2 * BORDER
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    row = p // pitch
    y = row + first - BORDER
    xx = p - row * pitch - BORDER
    real = p < rows * pitch
    inside = real & (y >= 0) & (y < height) & (xx >= 0) & (xx < width)
    c = tl.arange(0, CP)
    kept = inside[:, None] & (c < C)[None, :]
    # Rows of the tile relative to its first one: 32-bit offsets on a 64-bit base.
    y0 = tl.minimum(tl.maximum(tl.program_id(0) * BP // pitch + first - BORDER, 0), height - 1)
    base = x + (d.to(tl.int64) * x_t + y0.to(tl.int64) * x_y) * UNIT
    at = (y - y0) * (x_y * UNIT) + xx * (x_x * UNIT)
    v = tl.load(base + at[:, None] + c[None, :], mask=kept, other=0.0).to(tl.float32)
    scale, shift, gain_row = vectors(coefs, coefs, coefs, gains, coefs, d, c, C, "group", False, False, False, GAINS,
                                     FAST)
    v = v * scale[None, :] + shift[None, :]
    place = affine + ((y // each) * columns + xx // each)[:, None] * (2 * C) + c[None, :]
    v = v * tl.load(place, mask=kept, other=0.0) + tl.load(place + C, mask=kept, other=0.0)
    v = activated(v, scale, shift, gain_row, coefs, 0.0, C, "none", False, False, False, GAINS, SILU, FAST)
    v = tl.where(kept, v, 0.0)
    v = formatted(v, gain, 0.0, -limit, limit, CLAMP, ROUND).to(out.dtype.element_ty)
    at_slot = slot + d
    at_slot = tl.where(at_slot >= slots, at_slot - slots, at_slot)
    start = (at_slot.to(tl.int64) * (rows * pitch) + tl.program_id(0) * BP) * CO
    i = tl.arange(0, BP)
    tl.store(out + start + i[:, None] * CO + c[None, :], v, mask=real[:, None] & (c < CO)[None, :])
