"""The reference of duplicate: gather channels, sample by sample."""

from __future__ import annotations

import torch
from torch import Tensor


def duplicate(x: Tensor, out: Tensor, frames: int, drop: int, samples_first: bool) -> None:
    k, samples = out.shape[3], 4 * frames
    each = k * samples // x.shape[3]
    channels = torch.arange(k, device=x.device)
    for p in range(samples):
        frame, row, column = p // 4, p // 2 % 2, p % 2
        source = x[int(frame < drop) :]
        target = out[(frame - drop) % frames :: frames, row::2, column::2]
        taken = p * k + channels if samples_first else channels * samples + p
        target.copy_(source.index_select(3, taken // each))
