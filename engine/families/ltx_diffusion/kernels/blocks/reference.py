"""Fused products in plain torch, fp32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.precision import exact_math
from .....kernels.tokens.reference import store
from .angles import Place, shares
from .schedules import GROUP


def _product(x: Tensor, eps: float, weight: Tensor, bias: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return normalised rows times a weight, plus a bias, in fp32; with scales `columns` of an 8-bit weight, of the
    rows' codes."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    wide_bias = None if bias is None else bias.float()
    with exact_math(x.device):
        if columns is None:
            return F.linear(normed, weight.float(), wide_bias)
        codes, scales = torch.empty_like(normed, dtype=weight.dtype), normed.new_empty(len(x))
        store(normed, codes, scales)
        made = F.linear(codes.float(), weight.float()) * scales[:, None] * columns
        return made if wide_bias is None else made + wide_bias


def projected(
    x: Tensor, weight: Tensor, bias: Tensor, norms: Tensor, table: Tensor, place: Place, eps: float,
    query: Tensor | None, keys: Tensor | None, *, columns: Tensor | None = None, **_: object,
) -> None:  # fmt: skip
    heads, head = (keys if query is None else query).shape[-2:]
    made = _product(x, eps, weight, bias, columns).view(len(x), 3, heads, head)
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


def gated_product(
    x: Tensor, weight: Tensor, biases: Tensor | None, eps: float, out: Tensor, *, columns: Tensor | None = None,
    scales: Tensor | None = None, **_: object,
) -> None:  # fmt: skip
    g, u = _product(x, eps, weight, biases, columns).unflatten(1, (-1, 2)).unbind(2)
    # SiLU is 0 at -inf, where its quotient would be NaN.
    found = F.silu(g).masked_fill_(g == -torch.inf, 0.0) * u
    if scales is None:
        out.copy_(found)
    else:
        store(found.view(-1, GROUP), out.view(-1, GROUP), scales.view(-1))


def added(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, more: tuple[Tensor, Tensor] | None = None, *,
    columns: Tensor | None = None, scales: Tensor | None = None, **_: object,
) -> None:  # fmt: skip
    wide = y.float()
    if scales is not None:
        wide = (wide.view(*scales.shape, GROUP) * scales[..., None]).flatten(1)
    with exact_math(x.device):
        made = F.linear(wide, weight.float())
        if columns is not None:
            made *= columns
        if bias is not None:
            made += bias.float()
        if more is not None:
            made += F.linear(more[0].float(), more[1].float())
    x.copy_(x.float() + made)


def feed_forward(
    x: Tensor, gates: Tensor, biases: Tensor | None, eps: float, down: Tensor,
    before: tuple[Tensor, Tensor, Tensor] | None = None, more: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    if before is not None:
        added(x, *before)
    inner = x.new_empty(len(x), down.shape[1])
    gated_product(x, gates, biases, eps, inner)
    ordered = down.unflatten(1, (-1, 4, 2)).transpose(2, 3).flatten(1)
    pair, bias = (None, None) if more is None else (more[:2], more[2])
    added(x, inner, ordered, bias, pair)
