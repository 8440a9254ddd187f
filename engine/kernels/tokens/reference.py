"""Passes over tokens in plain torch, fp32 arithmetic."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..targets import FP8

#: The largest number of an 8-bit type; the largest value of a row is scaled to it.
LIMITS = {FP8: 448.0, torch.int8: 127.0}
#: The scale of a row of zeros.
LEAST_SCALE = 1e-12


@functools.cache
def hadamard(group: int) -> Tensor:
    """Return the matrix [group, group] in float32 that rotates so many columns, a power of 4; it is its own inverse."""
    four = 0.5 - torch.eye(4, dtype=torch.float32, device="cpu").flip(0)
    turn = four
    while len(turn) < group:
        turn = torch.kron(turn, four)
    return turn


def turned(values: Tensor, group: int) -> Tensor:
    """Rotate each `group` columns of float32 [R, D] by `hadamard`."""
    return (values.view(-1, group) @ hadamard(group).to(values.device)).view(values.shape)


def store(values: Tensor, out: Tensor, scales: Tensor | None, turn: int = 0) -> None:
    """Store fp32 [R, D] into `out`; in 8 bit, `turned` first where `turn` is not 0, so that a row's largest becomes
    the type's of `LIMITS`, with its scale into `scales` [R]: NaN where a value is not finite."""
    if scales is None:
        out.copy_(values)
        return
    limit = LIMITS[out.dtype]
    values = turned(values, turn) if turn else values
    torch.div(values.abs().amax(1), limit, out=scales).clamp_min_(LEAST_SCALE)
    scales.masked_fill_(~scales.isfinite(), torch.nan)
    scaled = (values / scales[:, None]).clamp_(-limit, limit)
    out.copy_((scaled + 0.5).floor_() if out.dtype == torch.int8 else scaled)


def normalised(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None = None, *, y: Tensor | None = None,
    scale: Tensor | None = None, turn: int = 0,
) -> None:  # fmt: skip
    if y is not None:
        x.copy_(torch.addcmul(x.float(), y.float(), scale.float()))
    wide = x.float()
    store(wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt() * weight.float(), out, scales, turn)


def rotated(qkv: Tensor, turns: Tensor, head: int, eps: float) -> None:
    heads = qkv.view(qkv.shape[0], -1, 3, head)
    half = turns.shape[2]
    where = torch.arange(qkv.shape[0], device=qkv.device) % turns.shape[0]
    cos, sin = (t[:, None, None] for t in turns[where].unbind(1))
    wide = heads[:, :, :2].float()
    wide = wide * (wide.square().mean(3, keepdim=True) + eps).rsqrt()
    a, b = wide[..., :half], wide[..., half : 2 * half]
    heads[:, :, :2] = torch.cat((a * cos - b * sin, a * sin + b * cos, wide[..., 2 * half :]), 3)


def gated(x: Tensor, out: Tensor, scales: Tensor | None = None, *, turn: int = 0) -> None:
    store(_gated(*x.float().chunk(2, 1)), out, scales, turn)


def _gated(gate: Tensor, value: Tensor) -> Tensor:
    """Multiply SiLU of a gate, which is 0 at -inf, where its quotient would be NaN, by a value."""
    return F.silu(gate).masked_fill_(gate == -torch.inf, 0.0) * value


def rounded(
    x: Tensor, out: Tensor, scales: Tensor | None = None, *, turn: int = 0, zeroed: bool = False
) -> None:
    store(x.float().masked_fill(x.isnan(), 0.0) if zeroed else x.float(), out, scales, turn)


def summed(
    sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor, out: Tensor, *, pairs: bool = False,
    scale: Tensor | None = None,
) -> None:  # fmt: skip
    wide = sums.float() * rows[:, None] * columns + bias.float()
    if scale is not None:
        wide = torch.addcmul(out.float(), wide, scale.float())
    out.copy_(_gated(wide[:, ::2], wide[:, 1::2]) if pairs else wide)


def attended(qkv: Tensor, tokens: int, head: int, out: Tensor) -> None:
    q, k, v = qkv.float().view(len(qkv) // tokens, tokens, -1, 3, head).permute(3, 0, 2, 1, 4)
    found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(out.shape)
    out.copy_(found.masked_fill_(found.isnan(), 0.0))
