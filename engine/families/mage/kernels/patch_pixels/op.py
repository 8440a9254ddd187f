"""The network of a pixel: its packed weights, and what turns positions into patches of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.conv3d import Pixels
from .....kernels.launching import launcher
from .....kernels.operators import HALVES, Takes, operator
from .....kernels.precision import exact_math
from .....kernels.targets import Target, widened
from .schedules import Schedule, pick

#: Positions of the reference at a time: 64 with 256 pixels of 32 features each are 2 MiB in fp32.
POSITIONS = 64
#: Channels of a stream are whole steps of a product.
_TAKES = Takes(*HALVES, channels=range(16, 1 << 16, 16))


@dataclass(frozen=True)
class PatchNetwork:
    """Weights for F features of a pixel and P pixels of a patch. F is padded with zeros behind the `features` real
    ones; products are in the type of activations, everything else is float32.

    Attributes:
        first, first_bias: [P, F, C] and [P, F], of the first stream's channels.
        second, second_bias: the same of the second stream's; SiLU follows.
        products: [blocks, 5, F, F]: of shift, scale and gate, then the first and the second of the branch.
        vectors: [blocks, 7, F]: added to shift, scale (with its 1) and gate; weight and bias of the norm; added to the
            products of the branch.
        last, last_bias: [3, F], the last norm's weight in it, and [3].
    """

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    products: Tensor
    vectors: Tensor
    last: Tensor
    last_bias: Tensor
    features: int

    @property
    def patch(self) -> int:
        """Return the pixels of a patch's side."""
        return round(len(self.first) ** 0.5)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of operands."""
        return self.first.dtype


def fits(dtype: torch.dtype, channels: int) -> bool:
    """Return whether the kernel takes operands of this type and streams of so many channels."""
    return _TAKES.why_not(dtype, channels=channels) is None


def _check(x: Tensor, weights: PatchNetwork, eps: float, out: Tensor, **_: Any) -> None:
    (d, h, w, c), n = x.shape, weights.patch
    if out.shape != (d, n * h, n * w, 3) or c != 2 * weights.first.shape[2] or x.dtype != weights.dtype:
        raise ValueError(f"patch_pixels of {list(x.shape)} cannot fill {list(out.shape)}")
    if not x.is_contiguous() or not out.is_contiguous():
        raise ValueError("patch_pixels takes contiguous tensors")


def _reference(
    x: Tensor, w: PatchNetwork, eps: float, out: Tensor, *, pixels: Pixels, health: Tensor | None = None, **_: Any
) -> None:
    """In fp32 arithmetic with operands of the packed type, some positions at a time."""
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


@operator("patch_kernel", reference=_reference, check=_check, takes=_TAKES,
          sizes=lambda x, *_, **__: {"channels": x.shape[3] // 2})
def patch_pixels(
    here: Target, x: Tensor, weights: PatchNetwork, eps: float, out: Tensor, *, pixels: Pixels,
    health: Tensor | None = None, schedule: Schedule | None = None,
) -> None:  # fmt: skip
    """Turn positions into patches of finished pixels.

    Args:
        x: [D, H, W, 2 C] contiguous, two streams of channels.
        weights: of operands of x's type.
        eps: of the norms.
        out: [D, H * patch, W * patch, 3] contiguous, in float32, float16 or uint8.
        pixels: range of the results.
        health: float32 [], set to NaN if a value was not finite before it was clamped.
        schedule: overrides the table (checks and tuning only).

    Raises:
        ValueError: other shapes.
    """
    (d, h, w, c), n = x.shape, weights.patch
    s = schedule or pick(here.sm)
    depth = s.depth
    while c // 2 % depth:
        depth //= 2
    launcher("patch_pixels.patch_kernel", here)[(-(-d * h * w // s.positions), n)](
        x, weights.first, weights.first_bias, weights.second, weights.second_bias, weights.products, weights.vectors,
        weights.last, weights.last_bias, out, weights.last_bias if health is None else health, d * h * w, h, w, eps,
        pixels.gain, pixels.offset, pixels.low, pixels.high, C=c // 2, F=weights.first.shape[1],
        REAL=weights.features, BLOCKS=len(weights.products), N=n, ROUND=out.dtype == torch.uint8,
        HEALTH=health is not None, UPCAST=widened(x), BM=s.positions,
        BK=depth, num_warps=s.warps, num_stages=s.stages,
    )  # fmt: skip
