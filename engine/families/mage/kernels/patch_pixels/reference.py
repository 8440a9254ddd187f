"""The network of a pixel in plain torch: fp32 arithmetic, operands of the packed type, some positions at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.conv3d import Pixels
from .....kernels.precision import exact_math
from .types import PatchNetwork

#: Positions at a time: 64 with 256 pixels of 32 features each are 2 MiB in fp32.
POSITIONS = 64


def patch_pixels(x: Tensor, w: PatchNetwork, eps: float, out: Tensor, pixels: Pixels, health: Tensor | None) -> None:
    d, h, width, c = x.shape
    n, rows = w.patch, x.reshape(-1, c)
    made = torch.cat([_positions(part, w, eps) for part in rows.split(POSITIONS)])
    if health is not None:
        health.add_(made.sum(), alpha=0.0)
    made = (made * pixels.gain + pixels.offset).clamp(pixels.low, pixels.high)
    blocks = made.view(d, h, width, n, n, 3).transpose(2, 3).reshape(d, n * h, n * width, 3)
    out.copy_(blocks.round_() if out.dtype == torch.uint8 else blocks)


def _positions(rows: Tensor, w: PatchNetwork, eps: float) -> Tensor:
    """Return the colours of positions [R, 2 C]: float32 [R, P, 3]."""
    first, second = rows.float().chunk(2, 1)
    real, wide = w.features, w.products.float()

    def operand(x: Tensor) -> Tensor:
        return x.to(w.dtype).float()

    with exact_math(rows.device):
        x = F.linear(first, w.first.float().flatten(0, 1)).view(len(rows), *w.first.shape[:2]) + w.first_bias
        y = F.linear(second, w.second.float().flatten(0, 1)).view_as(x) + w.second_bias
        y = operand(F.silu(y))
        for products, vectors in zip(wide, w.vectors, strict=True):
            shift, scale, gate = (F.linear(y, p) + v for p, v in zip(products[:3], vectors[:3], strict=True))
            normed = F.layer_norm(x[..., :real], (real,), vectors[3][:real], vectors[4][:real], eps)
            normed = F.pad(normed, (0, x.shape[2] - real))
            inner = operand(F.silu(F.linear(operand(normed * scale + shift), products[3]) + vectors[5]))
            x = x + gate * (F.linear(inner, products[4]) + vectors[6])
        x = x * (x.square().sum(-1, keepdim=True) / real + eps).rsqrt()
        return F.linear(x, w.last) + w.last_bias
