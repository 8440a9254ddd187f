"""Passes between products in plain torch, fp32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, more: Tensor | None) -> None:
    if more is not None:
        x.add_(more)
    out.copy_(F.layer_norm(x.float(), (x.shape[1],), weight, bias, eps))


def mixed(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, sums: Tensor, positions: int) -> None:
    h, w, c = x.shape
    padded = F.pad(x.float(), (0, 0, 1, 1, 1, 1))
    total = bias.expand(h, w, c).clone()
    for tap in range(9):
        row, column = divmod(tap, 3)
        total.addcmul_(padded[row : row + h, column : column + w], weight[tap])
    made = F.gelu(total)
    out.copy_(made)
    flat = F.pad(made.view(h * w, c), (0, 0, 0, len(sums) * positions - h * w))
    torch.sum(flat.view(len(sums), positions, c), 1, out=sums)
