"""Fused products in plain torch, fp32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..precision import exact_math
from .angles import Place, shares


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)


def projected(
    x: Tensor, weight: Tensor, bias: Tensor, norms: Tensor, table: Tensor, place: Place, eps: float,
    query: Tensor | None, keys: Tensor | None,
) -> None:  # fmt: skip
    heads, head = (keys if query is None else query).shape[-2:]
    with exact_math(x.device):
        made = F.linear(_normed(x, eps), weight.float(), bias.float()).view(len(x), 3, heads, head)
    if query is not None:
        query.copy_(_turned(made[:, 0], norms[0], table, place, eps))
    if keys is not None:
        keys[:, 0].copy_(_turned(made[:, 1], norms[1], table, place, eps))
        keys[:, 1].copy_(made[:, 2])


def turned(x: Tensor, bias: Tensor, norm: Tensor, table: Tensor, place: Place, eps: float) -> None:
    x.copy_(_turned(x.float() + bias.float().view(x.shape[1:]), norm, table, place, eps))


def _turned(x: Tensor, norm: Tensor, table: Tensor, place: Place, eps: float) -> Tensor:
    """Normalise and turn heads [R, heads, head]."""
    of_frame, of_row, of_column = table.split(shares(x.shape[2]), 1)
    frame, token = (f(torch.arange(len(x), device=x.device), place.height * place.width)
                    for f in (torch.floor_divide, torch.remainder))  # fmt: skip
    row, column = token // place.width, token % place.width
    turns = torch.cat((of_frame[place.first + frame], of_row[row], of_column[column]), 1)
    cos, sin = (t[:, None] for t in turns.unbind(-1))
    wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def gated_product(x: Tensor, weight: Tensor, biases: Tensor | None, eps: float, out: Tensor) -> None:
    with exact_math(x.device):
        made = F.linear(_normed(x, eps), weight.float(), None if biases is None else biases.float())
    g, u = made.unflatten(1, (-1, 2)).unbind(2)
    # SiLU is 0 at -inf, where its quotient would be NaN.
    out.copy_(F.silu(g).masked_fill_(g == -torch.inf, 0.0) * u)


def added(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, more: tuple[Tensor, Tensor] | None) -> None:
    with exact_math(x.device):
        made = F.linear(y.float(), weight.float(), None if bias is None else bias.float())
        if more is not None:
            made += F.linear(more[0].float(), more[1].float())
    x.copy_(x.float() + made)
