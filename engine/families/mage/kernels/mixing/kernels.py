# ruff: noqa: ANN001, ANN201
"""Passes between products: a program has one row, or some positions of some channels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_normed_kernel(x, more, later, weight, bias, out, eps, C: tl.constexpr, STRIDE: tl.constexpr,
                        BLOCK: tl.constexpr, ADDS: tl.constexpr):  # fmt: skip
    """x += more, rounded as x is; then less its mean, over its deviation, times weight, plus bias. x is stored plus
    `later`. STRIDE: of rows."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    real = c < C
    v = tl.load(x + row * STRIDE + c, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        v += tl.load(more + row * C + c, mask=real, other=0.0).to(tl.float32)
        kept = v + tl.load(later + c, mask=real, other=0.0)
        tl.store(x + row * STRIDE + c, kept.to(x.dtype.element_ty), mask=real)
        v = v.to(x.dtype.element_ty).to(tl.float32)
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


@triton.jit
def gates_kernel(sums, weight, bias, second, out, count, C: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The sigmoid of a product of means with weight [C, C], which each column of `second` [C, C] is multiplied by."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.load(bias + n, mask=n < C, other=0.0)
    for k0 in range(0, C, BK):
        k = k0 + tl.arange(0, BK)
        both = (n < C)[:, None] & (k < C)[None, :]
        mean = tl.load(sums + k, mask=k < C, other=0.0) / count
        total += tl.sum(tl.load(weight + n[:, None] * C + k[None, :], mask=both, other=0.0) * mean[None, :], 1)
    gate = (1.0 / (1.0 + tl.exp(-total)))[None, :]
    for k0 in range(0, C, BK):
        k = k0 + tl.arange(0, BK)
        at, both = k[:, None] * C + n[None, :], (k < C)[:, None] & (n < C)[None, :]
        made = tl.load(second + at, mask=both, other=0.0) * gate
        tl.store(out + at, made.to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["height", "width"])
def windows_kernel(picture, windows, height, width, SIDE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
                   BACK: tl.constexpr):  # fmt: skip
    """Copy a window's position from the picture, beyond it from the nearest; BACK: add it to the picture."""
    i = tl.program_id(0)
    window, place, across = i // (SIDE * SIDE), i % (SIDE * SIDE), tl.cdiv(width, SIDE)
    row = window // across * SIDE + place // SIDE
    column = window % across * SIDE + place % SIDE
    c = tl.arange(0, BLOCK)
    at = picture + (tl.minimum(row, height - 1) * width + tl.minimum(column, width - 1)).to(tl.int64) * C + c
    own = windows + i.to(tl.int64) * C + c
    if BACK:
        real = (c < C) & (row < height) & (column < width)
        v = tl.load(at, mask=real, other=0.0).to(tl.float32) + tl.load(own, mask=real, other=0.0).to(tl.float32)
        tl.store(at, v.to(picture.dtype.element_ty), mask=real)
    else:
        tl.store(own, tl.load(at, mask=c < C, other=0.0), mask=c < C)
