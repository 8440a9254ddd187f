"""Dispatch of patch_pixels: a kernel where there is one, else torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .....kernels.conv3d import Pixels
from .....kernels.launching import launcher
from .....kernels.observe import observed
from .....kernels.targets import interpreted, kernels_for, on_device
from . import reference
from .schedules import Schedule, pick
from .types import PatchNetwork

#: Channels of a stream that the kernel takes are a multiple of this.
UNIT = 16


def fits(dtype: torch.dtype, channels: int) -> bool:
    """Return whether the kernel takes operands of this type and streams of so many channels."""
    return dtype in (torch.float16, torch.bfloat16) and channels % UNIT == 0


@observed
def patch_pixels(
    x: Tensor, weights: PatchNetwork, eps: float, out: Tensor, *, pixels: Pixels, health: Tensor | None = None,
    backend: str = "auto", schedule: Schedule | None = None,
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
    if out.shape != (d, n * h, n * w, 3) or c != 2 * weights.first.shape[2] or x.dtype != weights.dtype:
        raise ValueError(f"patch_pixels of {list(x.shape)} cannot fill {list(out.shape)}")
    if not x.is_contiguous() or not out.is_contiguous():
        raise ValueError("patch_pixels takes contiguous tensors")
    here = kernels_for(x.device, backend) if fits(x.dtype, c // 2) else None
    if here is None:
        reference.patch_pixels(x, weights, eps, out, pixels, health)
        return
    s = schedule or pick(here.sm)
    depth = s.depth
    while c // 2 % depth:
        depth //= 2
    with on_device(x):
        launcher("patch_pixels.patch_kernel", here)[(-(-d * h * w // s.positions), n)](
            x, weights.first, weights.first_bias, weights.second, weights.second_bias, weights.products,
            weights.vectors, weights.last, weights.last_bias, out, weights.last_bias if health is None else health,
            d * h * w, h, w, eps, pixels.gain, pixels.offset, pixels.low, pixels.high, C=c // 2,
            F=weights.first.shape[1], REAL=weights.features, BLOCKS=len(weights.products), N=n,
            ROUND=out.dtype == torch.uint8, HEALTH=health is not None,
            UPCAST=interpreted() and x.is_cpu and x.dtype == torch.bfloat16, BM=s.positions, BK=depth,
            num_warps=s.warps, num_stages=s.stages,
        )  # fmt: skip
