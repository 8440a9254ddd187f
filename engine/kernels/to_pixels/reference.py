"""The last convolution and its output format in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..conv3d import Epilogue, Geometry, Weight
from ..conv3d import reference as conv
from .types import Pixels


def to_pixels(x: Tensor, weight: Weight, bias: Tensor, out: Tensor, pixels: Pixels, start: int) -> None:
    """See dispatch.to_pixels; frame by frame, so that the fp32 copies stay small."""
    for d in range(out.shape[0]):
        wide = torch.empty(1, *out.shape[1:], dtype=torch.float32, device=out.device)
        conv.conv3d(x, weight, wide, Geometry(), Epilogue(bias=bias), (start + d) % x.shape[0])
        wide = (wide * pixels.gain + pixels.offset).clamp(pixels.low, pixels.high)
        out[d] = (wide[0].round() if out.dtype == torch.uint8 else wide[0]).to(out.dtype)
