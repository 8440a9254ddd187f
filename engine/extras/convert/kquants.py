"""K-quant encoders (Q2_K to Q6_K), written from ggml's published block formats; the gguf package only decodes them.

A block is 256 values in sub-blocks of 16 or 32. Each sub-block has a small integer scale (and, for Q2_K, Q4_K and Q5_K,
a minimum); one or two fp16 factors per block scale those. Encoding fits each sub-block by least squares over a few
candidate steps, quantises the scales, then rounds every value with the scales as they will be read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 256
# Blocks encoded at a time: 256 KB of float32, so that the candidate loop stays in cache. This uses numpy, because
# hundreds of short torch operations per step start and stop threads, and on a busy machine wait for the slowest core
# each time.
BLOCKS_PER_STEP = 256
# Candidate positions of the largest value past (or short of) the last level, in levels.
_SYMMETRIC_OFFSETS = tuple(0.1 * i for i in range(-9, 10))
_AFFINE_OFFSETS = tuple(0.1 * i for i in range(-10, 11))

Array = np.ndarray


def quantize(values: Array, type_name: str) -> Array:
    """Encode float32 [n], n a multiple of 256, as uint8 [n / 256 * block bytes] of the K type `type_name`."""
    encode = ENCODERS[type_name]
    blocks = values.reshape(-1, BLOCK)
    steps = range(0, len(blocks), BLOCKS_PER_STEP)
    with np.errstate(all="ignore"):  # `_reciprocal` handles quotients by zero
        return np.concatenate([encode(blocks[i : i + BLOCKS_PER_STEP]).reshape(-1) for i in steps])


def _fit_symmetric(x: Array, levels: int) -> Array:
    """Return the scale [m] of each column of x [n, m] for which scale * q, q in -levels..levels-1, is nearest to x."""
    peak = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    best, best_gain = np.zeros_like(peak), np.zeros_like(peak)
    for offset in _SYMMETRIC_OFFSETS:
        # The peak maps to -levels, the wider side of the range.
        q = _round(x * _reciprocal(peak, -(levels + offset)), -levels, levels - 1)
        xq, qq = np.einsum("nm,nm->m", x, q), np.einsum("nm,nm->m", q, q)
        scale = xq * _reciprocal(qq)
        gain = xq * scale  # the reduction of the squared error by the best scale for this q
        best = np.where(gain > best_gain, scale, best)
        best_gain = np.maximum(gain, best_gain)
    return best


def _fit_affine(x: Array, top: int) -> tuple[Array, Array]:
    """Return scale s >= 0 and minimum m >= 0 of each column of x [n, m]: s * q - m, q in 0..top, is nearest to x."""
    n = x.shape[0]
    low = np.minimum(x.min(0), 0)
    span = np.maximum(x.max(0), 0) - low
    shifted = x - low
    sum_x = x.sum(0)
    best_scale, best_low = span / top, low
    best_gain = np.full_like(low, -np.inf)
    for offset in _AFFINE_OFFSETS:
        q = _round(shifted * _reciprocal(span, top + offset), 0, top)
        sum_q, sum_xq, sum_qq = q.sum(0), np.einsum("nm,nm->m", x, q), np.einsum("nm,nm->m", q, q)
        inverse = _reciprocal(n * sum_qq - sum_q * sum_q)
        scale = (n * sum_xq - sum_x * sum_q) * inverse
        base = (sum_qq * sum_x - sum_q * sum_xq) * inverse
        # The format has no positive base: the line through the origin is the best one possible.
        scale = np.where(base > 0, sum_xq * _reciprocal(sum_qq), scale)
        base = np.minimum(base, 0)
        # Squared error = sum x^2 - gain, expanded so that no second pass over the values is needed.
        gain = 2 * (scale * sum_xq + base * sum_x) - scale * (scale * sum_qq + 2 * base * sum_q) - n * base * base
        better = (gain > best_gain) & (scale > 0)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, base, best_low)
        best_gain = np.where(better, gain, best_gain)
    return best_scale, -best_low


def _columns(blocks: Array, sub: int) -> Array:
    """Return sub-blocks as columns [sub, m]: sums over the first dimension run at full width, over the last they do
    not."""
    return np.ascontiguousarray(blocks.reshape(-1, sub).T)


def _round(x: Array, low: int, high: int) -> Array:
    """Round and clip in place."""
    np.rint(x, out=x)
    return np.clip(x, low, high, out=x)


def _reciprocal(x: Array, numerator: float = 1.0) -> Array:
    """Return numerator / x, and 0 where x is 0 (an all-zero sub-block) or so small that the quotient overflows."""
    quotient = np.float32(numerator) / x
    return np.where(np.isfinite(quotient), quotient, np.float32(0))


def _half(x: Array) -> Array:
    """Return x as the fp16 factor that the file will hold, clipped to its range."""
    return np.clip(x, -65504, 65504).astype("<f2")


def _raw(half: Array) -> Array:
    return half.reshape(-1, 1).view(np.uint8)


def _affine(blocks: Array, sub: int, top: int, scale_top: int) -> tuple[Array, Array, Array, Array, Array]:
    """Return (d, dmin as fp16 [b], integer scales and minima [b, 256/sub], levels [b, 256/sub, sub])."""
    scale, minimum = (t.reshape(-1, BLOCK // sub) for t in _fit_affine(_columns(blocks, sub), top))
    d, dmin = _half(scale.max(1) / scale_top), _half(minimum.max(1) / scale_top)
    step, min_step = d.astype(np.float32)[:, None], dmin.astype(np.float32)[:, None]
    scales = _round(scale * _reciprocal(step), 0, scale_top)
    minima = _round(minimum * _reciprocal(min_step), 0, scale_top)
    x = blocks.reshape(-1, BLOCK // sub, sub) + (minima * min_step)[..., None]
    q = _round(x * _reciprocal(scales * step)[..., None], 0, top)
    return d, dmin, scales.astype(np.uint8), minima.astype(np.uint8), q.astype(np.uint8)


def _symmetric(blocks: Array, sub: int, levels: int, scale_levels: int) -> tuple[Array, Array, Array]:
    """Return (d as fp16 [b], integer scales [b, 256/sub] in -scale_levels.., levels from 0 [b, 256/sub, sub])."""
    scale = _fit_symmetric(_columns(blocks, sub), levels).reshape(-1, BLOCK // sub)
    # Integers reach one further below zero than above: d's sign maps the larger of the two extremes to that side.
    top, bottom = scale.max(1), -scale.min(1)
    positive = np.maximum(top / (scale_levels - 1), bottom / scale_levels)
    negative = np.maximum(bottom / (scale_levels - 1), top / scale_levels)
    d = _half(np.where(positive < negative, positive, -negative))
    step = d.astype(np.float32)[:, None]
    scales = _round(scale * _reciprocal(step), -scale_levels, scale_levels - 1)
    x = blocks.reshape(-1, BLOCK // sub, sub)
    q = _round(x * _reciprocal(scales * step)[..., None], -levels, levels - 1)
    return d, scales.astype(np.int8), (q + levels).astype(np.uint8)


def _pack_scales_6bit(scales: Array, minima: Array) -> Array:
    """Pack eight 6-bit scales and minima in 12 bytes; the top bits of the last four of each lie in the bytes of the
    first four."""
    s_low, s_high, m_low, m_high = scales[:, :4], scales[:, 4:], minima[:, :4], minima[:, 4:]
    packed = [s_low | (s_high >> 4 << 6), m_low | (m_high >> 4 << 6), (s_high & 15) | ((m_high & 15) << 4)]
    return np.concatenate(packed, 1)


def _pack_bits(rows: Array, bits: int) -> Array:
    """Pack [b, groups, 8 // bits, n] values of `bits` bits to [b, groups * n] bytes, the first row in the lowest
    bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return np.bitwise_or.reduce(rows << shifts, axis=2).reshape(len(rows), -1)


def _q2_k(blocks: Array) -> Array:
    d, dmin, scales, minima, q = _affine(blocks, sub=16, top=3, scale_top=15)
    return np.concatenate([scales | (minima << 4), _pack_bits(q.reshape(-1, 2, 4, 32), 2), _raw(d), _raw(dmin)], 1)


def _q3_k(blocks: Array) -> Array:
    d, scales, q = _symmetric(blocks, sub=16, levels=4, scale_levels=32)
    s = (scales + 32).view(np.uint8)
    low_scales, high_scales = _pack_bits((s & 15).reshape(-1, 1, 2, 8), 4), _pack_bits((s >> 4).reshape(-1, 1, 4, 4), 2)
    high, low = _pack_bits((q >> 2).reshape(-1, 1, 8, 32), 1), _pack_bits((q & 3).reshape(-1, 2, 4, 32), 2)
    return np.concatenate([high, low, low_scales, high_scales, _raw(d)], 1)


def _q4_k(blocks: Array) -> Array:
    d, dmin, scales, minima, q = _affine(blocks, sub=32, top=15, scale_top=63)
    low = _pack_bits(q.reshape(-1, 4, 2, 32), 4)
    return np.concatenate([_raw(d), _raw(dmin), _pack_scales_6bit(scales, minima), low], 1)


def _q5_k(blocks: Array) -> Array:
    d, dmin, scales, minima, q = _affine(blocks, sub=32, top=31, scale_top=63)
    high, low = _pack_bits((q >> 4).reshape(-1, 1, 8, 32), 1), _pack_bits((q & 15).reshape(-1, 4, 2, 32), 4)
    return np.concatenate([_raw(d), _raw(dmin), _pack_scales_6bit(scales, minima), high, low], 1)


def _q6_k(blocks: Array) -> Array:
    d, scales, q = _symmetric(blocks, sub=16, levels=32, scale_levels=128)
    low = _pack_bits((q & 15).reshape(-1, 2, 2, 64), 4)
    high = _pack_bits((q >> 4).reshape(-1, 2, 4, 32), 2)
    return np.concatenate([low, high, scales.view(np.uint8), _raw(d)], 1)


ENCODERS: dict[str, Callable[[Array], Array]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
