"""Algebra of the Winograd form: the planes of inputs, weights and products, and the packing of weights.

Outputs 2j and 2j + 1 of a row read inputs d0..d3 at 2j - 1 .. 2j + 2. With taps g0..g2 along x,
    inputs   v0 = d0 - d2    v1 = (d1 + d2) / 2    v2 = d2 - d1               v3 = d3 - d1
    weights  u0 = g0         u1 = g0 + g1 + g2     u2 = (g0 - g1 + g2) / 2    u3 = g2
    sums     m_p = sum of v_p * u_p over channels, rows and frames
    outputs  2j: m0 + m1 + m2      2j + 1: m1 - m2 + m3
Four products make two outputs, instead of six. v1 is a mean, so that it fits where its inputs did; so do the
differences of SiLU's results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..types import QUANT_MAX, Balance, Weight, padded_channels, quantise_rows

PLANES = 4
#: int8: the step of any plane of a row is at least this part of its coarsest one, which bounds the int32 sums.
_FINEST = 0.25


def pairs_of(width: int) -> int:
    """Return the columns of a plane."""
    return -(-width // 2)


def buffer_shape(height: int, width: int, channels: int) -> tuple[int, int, int, int]:
    """Return the shape of one frame of planes: [4, H + 2, ceil(W / 2), C]. The column borders are in the planes
    already."""
    return PLANES, height + 2, pairs_of(width), channels


def planes_of(frame: Tensor) -> Tensor:
    """Turn [..., 2 * pairs + 2, C] with border columns on both sides into planes [4, ..., pairs, C], in its type."""
    even, odd = frame[..., 0::2, :], frame[..., 1::2, :]
    d0, d1, d2, d3 = even[..., :-1, :], odd[..., :-1, :], even[..., 1:, :], odd[..., 1:, :]
    return torch.stack((d0 - d2, (d1 + d2) * 0.5, d2 - d1, d3 - d1))


def combined(sums: list[Tensor], mix: Tensor | None, width: int) -> Tensor:
    """Turn the planes' sums [D, H, P, K] into outputs [D, H, W, K], in units of the first and last plane."""
    m0, m1, m2, m3 = sums
    if mix is not None:
        m1, m2 = m1 * mix[0], m2 * mix[1]
    return torch.stack((m0 + (m1 + m2), m3 + (m1 - m2)), 3).flatten(2, 3)[:, :, :width]


def pack_planes(weight: Tensor, dtype: torch.dtype, phases: tuple[int, int, int] = (1, 1, 1), early: bool = False,
                balance: Balance | None = None) -> Weight:
    """Pack a conv weight [N, C, kt, kh, 3] (N = phases * K) for buffers of planes, computed in float32 and rounded
    once.

    fp8 rows have one scale for all planes; int8 rows one for planes 0 and 3, and `mix` has the scales of planes 1 and 2
    in units of it.

    Args:
        phases: as for `pack_weight`; the planes of one phase lie after those of another, and each is computed by
            itself.
        early, balance: as for `pack_weight`.
    """
    n, c, kt, kh, kw = weight.shape
    if kw != 3:
        raise ValueError(f"a kernel of {kw} columns has no Winograd form here: it takes 3")
    wide = padded_channels(c, dtype)
    taps = weight.float().permute(4, 0, 2, 3, 1)  # [kw, N, kt, kh, C]
    if balance is not None:
        taps = taps * balance(taps.permute(1, 2, 3, 0, 4).flatten(1, 3))
    g0, g1, g2 = taps
    rows = torch.stack((g0, g0 + g1 + g2, (g0 - g1 + g2) * 0.5, g2))
    rows = torch.nn.functional.pad(rows, (0, wide - c)).flatten(2)  # [4, N, kt * kh * C]
    data, scale, mix = _quantise(rows, dtype, wide)
    count = math.prod(phases)
    if count > 1:
        data = data.view(PLANES, count, n // count, -1).transpose(0, 1).reshape(data.shape)
    first: tuple[Weight, ...] = ()
    if early:
        # The channels' scales are part of the taps already.
        scaled = taps.permute(1, 4, 2, 3, 0)
        before, last = scaled[:, :, :2].sum(2, keepdim=True), scaled[:, :, 2:]
        parts = before + last, torch.cat((before, last), 2)
        first = tuple(pack_planes(part, dtype) for part in parts)
    return Weight(data, wide, n // count, (kt, kh, kw), scale, phases, early=first, winograd=True, mix=mix)


def _quantise(rows: Tensor, dtype: torch.dtype, channels: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Quantise [4, K, taps * channels] float32; return data [4 * K, taps * channels], scale [K], and for int8 the
    scales of planes 1 and 2, as parts of that of planes 0 and 3 [2, K]."""
    planes, k, depth = rows.shape
    if dtype != torch.int8:
        data, scale = quantise_rows(rows.transpose(0, 1).reshape(k, -1), dtype, channels)
        return data.view(k, planes, depth).transpose(0, 1).reshape(-1, depth).contiguous(), scale, None
    if rows.is_meta:
        return rows.flatten(0, 1).to(dtype), rows.new_empty(k), rows.new_empty(planes - 2, k)
    scale = rows.abs().amax(2).clamp_min(1e-12) / QUANT_MAX[torch.int8]
    outer = torch.maximum(scale[:1], scale[-1:])
    scale = torch.cat((outer, scale[1:-1], outer))
    scale = torch.maximum(scale, scale.amax(0, keepdim=True) * _FINEST)
    data = (rows / scale[..., None]).round().to(torch.int8)
    return data.flatten(0, 1), scale[0], (scale[1:-1] / scale[:1]).contiguous()
