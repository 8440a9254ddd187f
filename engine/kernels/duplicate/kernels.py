# ruff: noqa: ANN001, ANN201
"""One program writes BP positions of an output frame, in whole rows of channels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=[
    "height", "width", "drop", "x_t", "x_y", "x_x", "out_t", "out_y", "out_x",
])
def duplicate_kernel(x, out, height, width, drop, x_t, x_y, x_x, out_t, out_y, out_x,
                     K: tl.constexpr, EACH: tl.constexpr, FRAMES: tl.constexpr, SAMPLES_FIRST: tl.constexpr,
                     UNIT: tl.constexpr, KP: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    # Strides come in units of 16 elements where they allow it, which tells the compiler that accesses are aligned.
    f = tl.program_id(1) + drop
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    y = p // (2 * width)
    column = p - y * (2 * width)
    k = tl.arange(0, KP)
    kept = (y < 2 * height)[:, None] & (k < K)[None, :]
    sample = (f % FRAMES * 2 + y % 2) * 2 + column % 2
    if SAMPLES_FIRST:
        channel = (sample[:, None] * K + k[None, :]) // EACH
    else:
        channel = (k[None, :] * (4 * FRAMES) + sample[:, None]) // EACH
    source = (f // FRAMES).to(tl.int64) * x_t + (y // 2).to(tl.int64) * x_y + (column // 2).to(tl.int64) * x_x
    target = tl.program_id(1).to(tl.int64) * out_t + y.to(tl.int64) * out_y + column.to(tl.int64) * out_x
    value = tl.load(x + (source * UNIT)[:, None] + channel, mask=kept)
    tl.store(out + (target * UNIT)[:, None] + k[None, :], value, mask=kept)
