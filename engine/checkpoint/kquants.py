"""K-quant encoders (Q2_K to Q6_K), written from ggml's published block formats; the gguf package only decodes them.

A block is 256 values in sub-blocks of 16 or 32. Each sub-block has a small integer scale (and, for Q2_K, Q4_K and
Q5_K, a minimum); one or two fp16 factors per block give those their size. Encoding fits each sub-block by least
squares over a few candidate steps, quantises the scales, then rounds every value with the scales as they will be read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 256
# Blocks encoded at a time: 2 MB of float32, so that the candidate loop stays in cache.
BLOCKS_PER_STEP = 2048
# How far the largest value may be pushed past (or kept short of) the last level, in levels.
_SYMMETRIC_OFFSETS = tuple(0.1 * i for i in range(-9, 10))
_AFFINE_OFFSETS = tuple(0.1 * i for i in range(-10, 11))


def quantize(values: Tensor, type_name: str) -> Tensor:
    """float32 [n], n a multiple of 256 -> uint8 [n / 256 * block bytes] of the K type `type_name`."""
    encode = ENCODERS[type_name]
    blocks = values.reshape(-1, BLOCK)
    return torch.cat([encode(part).reshape(-1) for part in blocks.split(BLOCKS_PER_STEP)])


def _fit_symmetric(x: Tensor, levels: int) -> Tensor:
    """The scale [m] of each column of x [n, m] for which scale * q, q in -levels..levels-1, is nearest to x."""
    peak = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    best, best_gain = torch.zeros_like(peak), torch.zeros_like(peak)
    for offset in _SYMMETRIC_OFFSETS:
        # The peak maps to -levels, the wider side of the range.
        q = (x * _reciprocal(peak, -(levels + offset))).round_().clamp_(-levels, levels - 1)
        xq, qq = (x * q).sum(0), q.square_().sum(0)
        scale = xq * _reciprocal(qq)
        gain = xq * scale  # what the best scale for this q takes off the squared error
        best = torch.where(gain > best_gain, scale, best)
        best_gain = torch.maximum(gain, best_gain)
    return best


def _fit_affine(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scale s >= 0 and minimum m >= 0 of each column of x [n, m]: s * q - m, q in 0..top, nearest to x."""
    n = x.shape[0]
    low = x.amin(0).clamp_(max=0)
    span = x.amax(0).clamp_(min=0) - low
    shifted = x - low
    sum_x = x.sum(0)
    best_scale, best_low = span / top, low
    best_gain = torch.full_like(low, -torch.inf)
    for offset in _AFFINE_OFFSETS:
        q = (shifted * _reciprocal(span, top + offset)).round_().clamp_(0, top)
        sum_q, sum_xq = q.sum(0), (x * q).sum(0)
        sum_qq = q.square_().sum(0)
        inverse = _reciprocal(n * sum_qq - sum_q * sum_q)
        scale = (n * sum_xq - sum_x * sum_q) * inverse
        base = (sum_qq * sum_x - sum_q * sum_xq) * inverse
        # The format has no positive base: the line through the origin is the best one left.
        scale = torch.where(base > 0, sum_xq * _reciprocal(sum_qq), scale)
        base.clamp_(max=0)
        # Squared error = sum x^2 - gain, expanded so that no second pass over the values is needed.
        gain = 2 * (scale * sum_xq + base * sum_x) - scale * (scale * sum_qq + 2 * base * sum_q) - n * base * base
        better = (gain > best_gain) & (scale > 0)
        best_scale = torch.where(better, scale, best_scale)
        best_low = torch.where(better, base, best_low)
        best_gain = torch.where(better, gain, best_gain)
    return best_scale, -best_low


def _columns(blocks: Tensor, sub: int) -> Tensor:
    """Sub-blocks as columns [sub, m]: sums over the first dimension run at full width, over the last they do not."""
    return blocks.reshape(-1, sub).t().contiguous()


def _reciprocal(x: Tensor, numerator: float = 1.0) -> Tensor:
    """numerator / x, and 0 where x is 0 (an all-zero sub-block) or so small that the quotient overflows."""
    quotient = numerator / x
    return torch.where(quotient.isfinite(), quotient, torch.zeros_like(x))


def _half(x: Tensor) -> Tensor:
    """x as the fp16 factor the file will hold, kept within its range."""
    return x.clamp(-65504, 65504).to(torch.float16)


def _raw(half: Tensor) -> Tensor:
    return half.contiguous().view(torch.uint8).reshape(half.shape[0], 2)


def _round_affine(x: Tensor, scale: Tensor, minimum: Tensor, top: int) -> Tensor:
    return ((x + minimum.unsqueeze(-1)) * _reciprocal(scale).unsqueeze(-1)).round_().clamp_(0, top).to(torch.uint8)


def _affine(blocks: Tensor, sub: int, top: int, scale_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(d, dmin as fp16 [b], integer scales and minima [b, 256/sub], levels [b, 256/sub, sub])."""
    x = blocks.reshape(-1, BLOCK // sub, sub)
    scale, minimum = (t.reshape(-1, BLOCK // sub) for t in _fit_affine(_columns(blocks, sub), top))
    d, dmin = _half(scale.amax(-1) / scale_top), _half(minimum.amax(-1) / scale_top)
    step, min_step = d.float().unsqueeze(-1), dmin.float().unsqueeze(-1)
    scales = (scale * _reciprocal(step)).round_().clamp_(0, scale_top)
    minima = (minimum * _reciprocal(min_step)).round_().clamp_(0, scale_top)
    levels = _round_affine(x, scales * step, minima * min_step, top)
    return d, dmin, scales.to(torch.uint8), minima.to(torch.uint8), levels


def _symmetric(blocks: Tensor, sub: int, levels: int, scale_levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """(d as fp16 [b], integer scales [b, 256/sub] in -scale_levels.., levels from 0 [b, 256/sub, sub])."""
    x = blocks.reshape(-1, BLOCK // sub, sub)
    scale = _fit_symmetric(_columns(blocks, sub), levels).reshape(-1, BLOCK // sub)
    # Integers reach one further below zero than above: d's sign puts the larger of the two extremes there.
    top, bottom = scale.amax(-1), -scale.amin(-1)
    positive = torch.maximum(top / (scale_levels - 1), bottom / scale_levels)
    negative = torch.maximum(bottom / (scale_levels - 1), top / scale_levels)
    d = _half(torch.where(positive < negative, positive, -negative))
    step = d.float().unsqueeze(-1)
    scales = (scale * _reciprocal(step)).round_().clamp_(-scale_levels, scale_levels - 1)
    q = (x * _reciprocal(scales * step).unsqueeze(-1)).round_().clamp_(-levels, levels - 1)
    return d, scales.to(torch.int8), (q + levels).to(torch.uint8)


def _pack_scales_6bit(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight 6-bit scales and minima in 12 bytes; the last four of each lend their top bits to the first four."""
    s_low, s_high, m_low, m_high = scales[:, :4], scales[:, 4:], minima[:, :4], minima[:, 4:]
    return torch.cat(
        [s_low | (s_high >> 4 << 6), m_low | (m_high >> 4 << 6), (s_high & 15) | ((m_high & 15) << 4)], dim=1
    )


def _pack_bits(rows: Tensor, bits: int) -> Tensor:
    """[b, groups, 8 // bits, n] values of `bits` bits -> [b, groups * n] bytes, the first row in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).reshape(1, 1, -1, 1)
    return (rows << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    d, dmin, scales, minima, q = _affine(blocks, sub=32, top=15, scale_top=63)
    low = _pack_bits(q.reshape(-1, 4, 2, 32), 4)
    return torch.cat([_raw(d), _raw(dmin), _pack_scales_6bit(scales, minima), low], 1)


def _q5_k(blocks: Tensor) -> Tensor:
    d, dmin, scales, minima, q = _affine(blocks, sub=32, top=31, scale_top=63)
    high, low = _pack_bits((q >> 4).unsqueeze(1), 1), _pack_bits((q & 15).reshape(-1, 4, 2, 32), 4)
    return torch.cat([_raw(d), _raw(dmin), _pack_scales_6bit(scales, minima), high, low], 1)


def _q2_k(blocks: Tensor) -> Tensor:
    d, dmin, scales, minima, q = _affine(blocks, sub=16, top=3, scale_top=15)
    return torch.cat([scales | (minima << 4), _pack_bits(q.reshape(-1, 2, 4, 32), 2), _raw(d), _raw(dmin)], 1)


def _q6_k(blocks: Tensor) -> Tensor:
    d, scales, q = _symmetric(blocks, sub=16, levels=32, scale_levels=128)
    low = _pack_bits((q & 15).reshape(-1, 2, 2, 64), 4)
    high = _pack_bits((q >> 4).reshape(-1, 2, 4, 32), 2)
    return torch.cat([low, high, scales.view(torch.uint8), _raw(d)], 1)


def _q3_k(blocks: Tensor) -> Tensor:
    d, scales, q = _symmetric(blocks, sub=16, levels=4, scale_levels=32)
    s = (scales + 32).view(torch.uint8)
    packed = torch.cat([_pack_bits((s & 15).reshape(-1, 1, 2, 8), 4), _pack_bits((s >> 4).reshape(-1, 1, 4, 4), 2)], 1)
    high, low = _pack_bits((q >> 2).reshape(-1, 1, 8, 32), 1), _pack_bits((q & 3).reshape(-1, 2, 4, 32), 2)
    return torch.cat([high, low, packed, _raw(d)], 1)


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
