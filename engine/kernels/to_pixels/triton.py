"""The last convolution, three outputs wide. As an implicit GEMM it would read its input 27 times for three columns;
here one pass multiplies every position by the 9 * K spatial columns of each temporal tap (reading each frame once and
keeping one accumulator per output frame in flight), and a second pass adds up the nine shifted columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "start", "plane", "first", "count", "frames"])
def columns_kernel(a, w, columns, slots, start, plane, first, count, frames,
                   C: tl.constexpr, N: tl.constexpr, KT: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """columns[d, n, p] for positions first .. first + count of every bordered plane; w is [KT * BN, C]."""
    p0 = tl.program_id(0) * BM
    p = p0 + tl.arange(0, BM)
    n = tl.arange(0, BN)
    keep = (p < count)[:, None] & (n < N)[None, :]
    depth = tl.arange(0, BK)
    rows = first + tl.where(p < count, p, 0)
    # One accumulator per output frame that still lacks taps: oldest (next to finish) and middle.
    oldest = tl.zeros((BM, BN), tl.float32)
    middle = tl.zeros((BM, BN), tl.float32)
    for f in range(0, frames + KT - 1):
        slot = start + f
        slot = tl.where(slot >= slots, slot - slots, slot)
        newest = tl.zeros((BM, BN), tl.float32)
        for c0 in range(0, C, BK):
            if TMA:
                at = a.load([slot * plane + first + p0, c0])
            else:
                at = tl.load(a + (slot * plane + rows).to(tl.int64)[:, None] * C + c0 + depth[None, :])
            for tap in tl.static_range(KT):
                if TMA:
                    bt = w.load([tap * BN, c0])
                else:
                    bt = tl.load(w + (tap * BN + n)[:, None] * C + c0 + depth[None, :])
                if UPCAST:
                    product_a, product_b = at.to(tl.float32), bt.to(tl.float32)
                else:
                    product_a, product_b = at, bt
                if tap == KT - 1:
                    oldest = tl.dot(product_a, product_b.T, oldest)
                elif tap == 1:
                    middle = tl.dot(product_a, product_b.T, middle)
                else:
                    newest = tl.dot(product_a, product_b.T, newest)
        if f >= KT - 1:
            skip = count.to(tl.int64) * (N * (f - KT + 1))
            where = columns + skip + n[None, :].to(tl.int64) * count + p[:, None]
            tl.store(where, oldest, mask=keep)
        if KT == 1:
            oldest = newest
        else:
            oldest = middle
            middle = newest


@triton.jit(do_not_specialize=["count", "pitch", "rows", "width", "out_t", "out_y", "out_x"])
def gather_kernel(columns, bias, out, count, pitch, rows, width, out_t, out_y, out_x, gain, offset, low, high,
                  K: tl.constexpr, ROUND: tl.constexpr, BP: tl.constexpr):  # fmt: skip
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
        value = tl.minimum(tl.maximum(value * gain + offset, low), high)
        if ROUND:
            value = (value + 12582912.0) - 12582912.0
        tl.store(place + k, value.to(out.dtype.element_ty), mask=keep)
