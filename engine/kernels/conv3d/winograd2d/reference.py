"""The form in plain torch: sums of inputs rounded to their type, as the kernel makes them, products in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...precision import exact_math
from ..types import Weight
from .algebra import BETWEEN, SWEEPS, tasks
from .pack import unpacked


def product(frames: Tensor, weight: Weight, origin: tuple[int, int], size: tuple[int, int, int]) -> Tensor:
    """Return the sums of products [D, H, W, K], in float32.

    Args:
        frames: [D + kt - 1, Hp, Wp, C] of the weight's type, in order.
        weight: from `pack_tiles`.
        origin: first row and column of the first output's window.
        size: D, H, W.
    """
    d, h, w = size
    x = frames[:, origin[0] :, origin[1] :]
    # Outputs come in pairs: what the last ones would read beyond the end is the last row and column again.
    rows = torch.arange(2 * -(-h // 2) + 2, device=x.device).clamp(max=x.shape[1] - 1)
    columns = torch.arange(2 * -(-w // 2) + 2, device=x.device).clamp(max=x.shape[2] - 1)
    x = x[:, rows][:, :, columns]
    last = (x.shape[1] - 2, x.shape[2] - 2)
    u = unpacked(weight).float()
    sums: list[Any] = [0.0] * 4
    for number, sweep in enumerate(SWEEPS):
        for task in tasks(number):
            known = {name: x[:, at[0] : at[0] + last[0] : 2, at[1] : at[1] + last[1] : 2]
                     for name, at in task.loads.items()}  # fmt: skip
            for name, sign, left, right in task.sums:
                known[name] = known[left] + known[right] if sign == "+" else known[left] - known[right]
            for slot in task.slots:
                made = _multiply(known[str(slot)][: d + len(u[0, 0]) - 1], u[number, slot])
                sums[sweep[slot].sum] = sums[sweep[slot].sum] + made
        for one, other, half in BETWEEN[number]:
            total, difference = sums[one] + sums[other], sums[one] - sums[other]
            sums[one], sums[other] = (total * 0.5, difference * 0.5) if half else (total, difference)
    # [column, row, D, H / 2, W / 2, K]
    tiles = torch.stack([torch.stack(sums[2 * c : 2 * c + 2]) for c in range(2)])
    return tiles.permute(2, 3, 1, 4, 0, 5).flatten(3, 4).flatten(1, 2)[:, :h, :w]


def _multiply(v: Tensor, u: Tensor) -> Tensor:
    """Return the products of v [frames, H, W, C] with u [kt, K, C], summed over frames and channels."""
    with exact_math(v.device):
        made = F.conv3d(v.float().permute(3, 0, 1, 2)[None], u.permute(1, 2, 0)[..., None, None])
    return made[0].permute(1, 2, 3, 0)
