# ruff: noqa: ANN001, ANN201, SIM108
"""The last convolution, up to three outputs wide. As an implicit GEMM it would read its input 27 times for three
columns; here one pass multiplies every position by the 9 * K spatial columns of each temporal tap (reading each frame
once and keeping one accumulator per output frame in flight), and a second pass adds up the nine shifted columns."""

from __future__ import annotations

import triton
import triton.language as tl

from ..conv3d.kernels import dot, formatted, note


@triton.jit(do_not_specialize=["slots", "start", "plane", "first", "count", "frames"])
def columns_kernel(a, w, columns, slots, start, plane, first, count, frames,
                   C: tl.constexpr, N: tl.constexpr, KT: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """columns[d, n, p] for positions first .. first + count of every bordered plane. w is [4 * BN, C], one block of BN
    columns per temporal tap and a block of zeros (tiles are powers of two), or [BN, C] where KT is 1."""
    p0 = tl.program_id(0) * BM
    p = p0 + tl.arange(0, BM)
    n = tl.arange(0, BN)
    keep = (p < count)[:, None] & (n < N)[None, :]
    rows = first + tl.where(p < count, p, 0)
    wide = tl.arange(0, 4 * BN if KT == 3 else BN)
    depth = tl.arange(0, BK)
    if C == BK:  # the weights stay in shared memory for all frames
        if TMA:
            bt = w.load([0, 0])
        else:
            bt = tl.load(w + wide[:, None] * C + depth[None, :])
    # One accumulator per output frame that still lacks taps: oldest (next to finish) and middle.
    oldest = tl.zeros((BM, BN), tl.float32)
    middle = tl.zeros((BM, BN), tl.float32)
    for f in range(0, frames + KT - 1):
        slot = start + f
        slot = tl.where(slot >= slots, slot - slots, slot)
        product = tl.zeros((BM, 4 * BN if KT == 3 else BN), tl.float32)
        if C == BK:
            if TMA:
                at = a.load([slot * plane + first + p0, 0])
            else:
                at = tl.load(a + (slot * plane + rows).to(tl.int64)[:, None] * C + depth[None, :])
            product = dot(at, bt.T, product, UPCAST)
        else:
            for c0 in range(0, C, BK):
                if TMA:
                    at = a.load([slot * plane + first + p0, c0])
                    bt = w.load([0, c0])
                else:
                    at = tl.load(a + (slot * plane + rows).to(tl.int64)[:, None] * C + c0 + depth[None, :])
                    bt = tl.load(w + wide[:, None] * C + c0 + depth[None, :])
                product = dot(at, bt.T, product, UPCAST)
        if KT == 3:
            left, right = tl.split(tl.permute(tl.reshape(product, (BM, 2, 2 * BN)), (0, 2, 1)))
            newest, second = tl.split(tl.permute(tl.reshape(left, (BM, 2, BN)), (0, 2, 1)))
            third, _ = tl.split(tl.permute(tl.reshape(right, (BM, 2, BN)), (0, 2, 1)))
            oldest += third
            middle += second
        else:
            oldest = product
        if f >= KT - 1:
            skip = count.to(tl.int64) * (N * (f - KT + 1))
            where = columns + skip + n[None, :].to(tl.int64) * count + p[:, None]
            tl.store(where, oldest, mask=keep)
        if KT == 3:
            oldest = middle
            middle = newest


@triton.jit(do_not_specialize=["count", "pitch", "rows", "width", "out_t", "out_y", "out_x"])
def gather_kernel(columns, bias, out, health, count, pitch, rows, width, out_t, out_y, out_x, gain, offset, low, high,
                  K: tl.constexpr, ROUND: tl.constexpr, HEALTH: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """out[d, y, x, k] = format(bias[k] + sum over (dh, dw) of columns[d, (dh, dw, k), (y + dh) * pitch + x + dw])."""
    d = tl.program_id(1)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    y = p // width
    x = p - y * width
    keep = p < rows * width
    base = columns + d.to(tl.int64) * (9 * K) * count + y * pitch + x
    place = out + d.to(tl.int64) * out_t + y.to(tl.int64) * out_y + x.to(tl.int64) * out_x
    for k in tl.static_range(K):
        value = tl.zeros((BP,), tl.float32) + tl.load(bias + k)
        for tap in tl.static_range(9):
            shift = (tap * K + k) * count.to(tl.int64) + (tap // 3) * pitch + tap % 3
            value += tl.load(base + shift, mask=keep, other=0.0)
        if HEALTH:
            note(health, tl.abs(value), keep)
        value = formatted(value, gain, offset, low, high, True, ROUND)
        tl.store(place + k, value.to(out.dtype.element_ty), mask=keep)
