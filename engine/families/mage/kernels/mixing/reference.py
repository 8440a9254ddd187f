"""Passes between products in plain torch, fp32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_normed(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, more: tuple[Tensor, Tensor] | None
) -> None:  # fmt: skip
    total = x.float() if more is None else x.float() + more[0].float()
    out.copy_(F.layer_norm(total.to(x.dtype).float(), (x.shape[1],), weight, bias, eps))
    if more is not None:
        x.copy_(total + more[1])


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


def gates(sums: Tensor, count: int, weight: Tensor, bias: Tensor, second: Tensor, out: Tensor) -> None:
    out.copy_(second * F.linear(sums / count, weight, bias).sigmoid())


def windows_of(height: int, width: int, window: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of a picture, row by row, that its windows hold: int64 [windows, window^2]. Windows start at
    the top left; where one goes beyond the picture, it holds the nearest position again."""
    rows, columns = (torch.arange(-(-n // window) * window, device=device).clamp_max_(n - 1).view(-1, window)
                     for n in (height, width))  # fmt: skip
    return (rows[:, None, :, None] * width + columns[None, :, None, :]).flatten(2).flatten(0, 1)


def places_in(height: int, width: int, window: int, device: torch.device | None = None) -> Tensor:
    """Return where the windows of `windows_of`, flattened, hold each position of the picture: int64 [H * W]."""
    rows, columns = (torch.arange(n, device=device) for n in (height, width))
    whole = (rows // window)[:, None] * -(-width // window) + columns // window
    return (whole * window**2 + (rows % window)[:, None] * window + columns % window).flatten()


def windowed(picture: Tensor, window: int, out: Tensor) -> None:
    h, w, c = picture.shape
    torch.index_select(picture.view(h * w, c), 0, windows_of(h, w, window, picture.device).flatten(), out=out)


def unwindowed(windows: Tensor, window: int, picture: Tensor) -> None:
    h, w, c = picture.shape
    picture.view(h * w, c).add_(windows[places_in(h, w, window, picture.device)])
