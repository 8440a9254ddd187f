# ruff: noqa: ANN001, ANN201
"""Passes between products: a program has one row, or some positions of some channels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_normed_kernel(x, more, weight, bias, out, eps, C: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
                        ADDS: tl.constexpr):  # fmt: skip
    """x += more, stored as x is; then less its mean, over its deviation, times weight, plus bias. STRIDE: of rows."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    real = c < C
    v = tl.load(x + row * STRIDE + c, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        v += tl.load(more + row * C + c, mask=real, other=0.0).to(tl.float32)
        kept = v.to(x.dtype.element_ty)
        tl.store(x + row * STRIDE + c, kept, mask=real)
        v = kept.to(tl.float32)
    v = tl.where(real, v - tl.sum(v, 0) / C, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / C + eps) * tl.load(weight + c, mask=real, other=0.0)
    v += tl.load(bias + c, mask=real, other=0.0)
    tl.store(out + row * C + c, v.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["height", "width"])
def mixed_kernel(x, weight, bias, out, sums, height, width, C: tl.constexpr, BP: tl.constexpr,
                 BC: tl.constexpr):  # fmt: skip
    """GELU of 3x3 taps of each channel, and its sums over the program's positions."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    real = c < C
    row, column = p // width, p % width
    inside = p < height * width
    total = tl.zeros((BP, BC), tl.float32) + tl.load(bias + c, mask=real, other=0.0)[None, :]
    for tap in tl.static_range(9):
        y, z = row + tap // 3 - 1, column + tap % 3 - 1
        there = inside & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        at = x + (y * width + z).to(tl.int64)[:, None] * C + c[None, :]
        value = tl.load(at, mask=there[:, None] & real[None, :], other=0.0).to(tl.float32)
        total += value * tl.load(weight + tap * C + c, mask=real, other=0.0)[None, :]
    made = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    keep = inside[:, None] & real[None, :]
    tl.store(out + p.to(tl.int64)[:, None] * C + c[None, :], made.to(out.dtype.element_ty), mask=keep)
    tl.store(sums + tl.program_id(0) * C + c, tl.sum(tl.where(keep, made, 0.0), 0), mask=real)
