# ruff: noqa: ANN001, ANN201
"""Normalise, scale and shift by the latent of a position, SiLU, quantise and border."""

from __future__ import annotations

import triton
import triton.language as tl

from ..conv3d.triton import formatted
from .triton import activated, vectors


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
