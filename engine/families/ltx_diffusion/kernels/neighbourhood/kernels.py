# ruff: noqa: ANN001, ANN201, ANN202
"""Attention within windows of tokens: a program has a tile of queries, and goes through the region of keys that lie in
any of their windows. Logits are bounded, so the softmax needs no running maximum.

Which query attends to which key of a frame is added to the logits by a product of TERMS more channels: a mask would
take as many instructions as the softmax itself."""

from __future__ import annotations

import triton
import triton.language as tl

from .....kernels.conv3d.kernels import dot


@triton.jit
def _place(i, RH: tl.constexpr, RW: tl.constexpr, WHOLE: tl.constexpr):
    """Return row and column of a region's keys number i, as `order` in windows.py has them; of the last one for larger
    numbers."""
    REST: tl.constexpr = RW - WHOLE if RW > WHOLE else 1
    after = tl.maximum(i - RH * WHOLE, 0)
    row = tl.where(i < RH * WHOLE, i // WHOLE, after // REST)
    column = tl.where(i < RH * WHOLE, i % WHOLE, WHOLE + after % REST)
    return tl.minimum(row, RH - 1), tl.minimum(column, RW - 1)


@triton.jit(do_not_specialize=["frames", "height", "width", "first", "clip", "ring", "slots", "down", "across",
                             "KT", "KH", "KW"])
def neighbourhood_kernel(q, k, v, hidden, kinds, out, frames, height, width, first, clip, ring, slots, down, across,
                         KT, KH, KW, scale, peak, HEADS: tl.constexpr, D: tl.constexpr, TOKEN_Q: tl.constexpr,
                         TOKEN_K: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr, BT: tl.constexpr,
                         BH: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TERMS: tl.constexpr,
                         WHOLE: tl.constexpr, INSIDE: tl.constexpr, RUNNING: tl.constexpr,
                         UPCAST: tl.constexpr):  # fmt: skip
    """Program (tile of queries, head), heads first. Keys of the clip's frame f are in slot (f + ring) % slots.

    KT, KH, KW: sizes of a window, as far as clip and frame have so many. scale: log2(e); peak: at least every logit
    times that. RUNNING: the peak is found on the way instead. INSIDE: no region reaches beyond the frame.
    """
    head, tile = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    place = tile % (down * across)
    t0, y0, x0 = tile // (down * across) * BT, place // across * BH, place % across * BW
    m, d, n, e = tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN), tl.arange(0, TERMS)
    t, y, x = t0 + m // (BH * BW), y0 + m // BW % BH, x0 + m % BW
    real = (m < BT * BH * BW) & (t < frames) & (y < height) & (x < width)
    row = (t * height + y).to(tl.int64) * width + x
    query = tl.load(q + row[:, None] * TOKEN_Q + head * D + d[None, :], mask=real[:, None], other=0.0)
    ours = (e[None, :] == (y - y0)[:, None]) | (e[None, :] == (BH + x - x0)[:, None])
    ours = ours.to(tl.float32).to(q.dtype.element_ty)
    top = tl.maximum(tl.minimum(y0 - KH // 2, height - RH), 0)
    left = tl.maximum(tl.minimum(x0 - KW // 2, width - RW), 0)
    # The window of each query in time, and the frames of all of them.
    begin = tl.maximum(tl.minimum(first + t - KT // 2, clip - KT), 0)
    start = tl.maximum(tl.minimum(first + t0 - KT // 2, clip - KT), 0)
    stop = tl.maximum(tl.minimum(first + tl.minimum(t0 + BT, frames) - 1 - KT // 2, clip - KT), 0) + KT
    slot0 = (start + ring) % slots
    blocks: tl.constexpr = (RH * RW + BN - 1) // BN
    theirs = hidden + tl.load(kinds + place).to(tl.int64) * (blocks * BN * TERMS) + n[:, None] * TERMS + e[None, :]
    # A step takes whole rows of WHOLE columns, but the last one of a frame.
    row_n, column_n = _place((blocks - 1) * BN + n, RH, RW, WHOLE)
    last = (row_n - (blocks - 1) * (BN // WHOLE)) * width + column_n
    others = n // WHOLE * width + n % WHOLE
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    most = tl.full((BM,), float("-inf"), tl.float32)
    # Factor of the second product. Without it that would run on beside the next step's first one, and the assembler
    # then has each instruction of both wait for the one before.
    one = tl.where(height > 0, 1.0, 0.0)
    for i in range(0, (stop - start) * blocks):
        frame, j = start + i // blocks, i % blocks
        slot = slot0 + i // blocks
        slot = tl.where(slot >= slots, slot - slots, slot).to(tl.int64)
        if INSIDE:
            at = (slot * height + top + j * (BN // WHOLE)) * width + left + tl.where(j == blocks - 1, last, others)
        else:  # keys beyond the frame are hidden
            row_n, column_n = _place(j * BN + n, RH, RW, WHOLE)
            at = (slot * height + tl.minimum(top + row_n, height - 1)) * width + tl.minimum(left + column_n, width - 1)
        at = at[:, None] * TOKEN_K + head * D + d[None, :]
        scores = dot(ours, tl.load(theirs + j * (BN * TERMS)).T, tl.zeros((BM, BN), tl.float32), UPCAST)
        scores = dot(query, tl.load(k + at).T, scores, UPCAST)
        seen = (frame >= begin) & (frame < begin + KT)
        if RUNNING:
            scores = tl.where(seen[:, None], scores * scale, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            # A query that has seen no key yet keeps nothing.
            known = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(scores - known[:, None])
            keep = tl.exp2(most - known)
            total, acc, most = total * keep, acc * keep[:, None], higher
        else:
            weight = tl.exp2(scores * scale - tl.where(seen, peak, float("inf"))[:, None])
        total += tl.sum(weight, 1)
        value = tl.load(v + at)
        acc += dot(weight.to(value.dtype), value, tl.zeros((BM, D), tl.float32), UPCAST) * one
    acc = acc / total[:, None]
    where = out + row[:, None] * (HEADS * D) + head * D + d[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=real[:, None])
