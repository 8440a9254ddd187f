"""The last convolution and its output format in plain torch."""

from __future__ import annotations

from torch import Tensor

from ..conv3d import Epilogue, Geometry, Pixels, Weight
from ..conv3d import reference as conv


def to_pixels(x: Tensor, weight: Weight, bias: Tensor, out: Tensor, pixels: Pixels, start: int,
              health: Tensor | None = None) -> None:
    """Do the same as dispatch.to_pixels, frame by frame, so that the fp32 copies stay small."""
    epilogue = Epilogue(bias=bias, pixels=pixels, health=health)
    for d in range(out.shape[0]):
        conv.conv3d(x, weight, out[d : d + 1], Geometry(), epilogue, (start + d) % x.shape[0])
