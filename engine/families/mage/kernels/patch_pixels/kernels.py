# ruff: noqa: ANN001, ANN201, ANN202
"""One program makes one row of pixels of every patch of a block of positions, pixel after pixel."""

from __future__ import annotations

import triton
import triton.language as tl

from .....kernels.conv3d.kernels import dot, formatted, note


@triton.jit
def _stream(rows, weight, bias, real, UPCAST: tl.constexpr, C: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
            BK: tl.constexpr):  # fmt: skip
    """Rows of one stream's channels times a pixel's weight [F, C], plus its bias."""
    k, f = tl.arange(0, BK), tl.arange(0, F)
    acc = tl.zeros((BM, F), tl.float32)
    for k0 in range(0, C, BK):
        left = tl.load(rows[:, None] + k0 + k[None, :], mask=real, other=0.0)
        right = tl.load(weight + f[:, None] * C + k0 + k[None, :])
        acc = dot(left, right.T, acc, UPCAST)
    return acc + tl.load(bias + f)[None, :]


@triton.jit
def _product(x, products, vectors, index, vector, UPCAST: tl.constexpr, F: tl.constexpr, BM: tl.constexpr):
    """x [BM, F] times one of a block's products, plus one of its vectors."""
    f = tl.arange(0, F)
    part = tl.load(products + (index * F + f)[:, None] * F + f[None, :])
    return dot(x, part.T, tl.zeros((BM, F), tl.float32), UPCAST) + tl.load(vectors + vector * F + f)[None, :]


@triton.jit(do_not_specialize=["positions", "height", "width"])
def patch_kernel(x, first, first_bias, second, second_bias, products, vectors, last, last_bias, out, health,
                 positions, height, width, eps, gain, offset, low, high, C: tl.constexpr, F: tl.constexpr,
                 REAL: tl.constexpr, BLOCKS: tl.constexpr, N: tl.constexpr, ROUND: tl.constexpr,
                 HEALTH: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    line = tl.program_id(1)
    keep = m < positions
    f = tl.arange(0, F)
    there = (f < REAL)[None, :]
    rows = x + m.to(tl.int64) * (2 * C)
    row, column = m // width, m % width  # rows of all pictures
    place = out + ((row * N + line).to(tl.int64) * width + column) * (N * 3)
    operand = x.dtype.element_ty
    for pixel in range(0, N):
        p = line * N + pixel
        y = _stream(rows + C, second + p * F * C, second_bias + p * F, keep[:, None], UPCAST, C, F, BM, BK)
        y = (y / (1.0 + tl.exp(-y))).to(operand)
        v = _stream(rows, first + p * F * C, first_bias + p * F, keep[:, None], UPCAST, C, F, BM, BK)
        for i in tl.static_range(BLOCKS):
            own, also = products + i * 5 * F * F, vectors + i * 7 * F
            shift = _product(y, own, also, 0, 0, UPCAST, F, BM)
            scale = _product(y, own, also, 1, 1, UPCAST, F, BM)
            centred = tl.where(there, v - (tl.sum(v, 1) / REAL)[:, None], 0.0)
            h = centred * tl.rsqrt(tl.sum(centred * centred, 1) / REAL + eps)[:, None]
            h = h * tl.load(also + 3 * F + f)[None, :] + tl.load(also + 4 * F + f)[None, :]
            h = _product((h * scale + shift).to(operand), own, also, 3, 5, UPCAST, F, BM)
            h = _product((h / (1.0 + tl.exp(-h))).to(operand), own, also, 4, 6, UPCAST, F, BM)
            v += _product(y, own, also, 2, 2, UPCAST, F, BM) * h
        v = v * tl.rsqrt(tl.sum(v * v, 1) / REAL + eps)[:, None]
        for colour in tl.static_range(3):
            value = tl.sum(v * tl.load(last + colour * F + f)[None, :], 1) + tl.load(last_bias + colour)
            if HEALTH:
                note(health, tl.abs(value), keep)
            value = formatted(value, gain, offset, low, high, True, ROUND)
            tl.store(place + pixel * 3 + colour, value.to(out.dtype.element_ty), mask=keep)
