"""Dispatch of upsample: the composed phase kernels, run by the convolution (which falls back to its reference by
itself)."""

from __future__ import annotations

from torch import Tensor

from ..conv3d import Epilogue, Geometry, Partials, conv3d
from .compose import Composed

_WHOLE = Geometry()


def upsample(x: Tensor, composed: Composed, out: Tensor, *, first: int, groups: int = 0, scale: float = 1.0,
             half_accumulate: bool = False, start: int = 0, geometry: Geometry = _WHOLE,
             backend: str = "auto") -> Partials | None:
    """Double rows and columns, and frames too where the weights are temporal.

    Args:
        x: zero-bordered [slots, H + 2, W + 2, C]; one frame of history where time doubles, else two (copies of the
            first frame when a clip starts).
        out: [F, 2H, 2W, K]: F = D where time stays, 2D, or 2D - 1 in the call that holds the clip's first frame (first
            == 0).
        first: index of x's first new frame within the clip.
        geometry: for a band of rows its place in the frame, since the bias differs at the frame's own edges.
    """
    epilogue = Epilogue(bias=composed.bias, groups=groups, scale=scale, half_accumulate=half_accumulate)
    return conv3d(x, composed.weight, out, geometry=geometry, epilogue=epilogue, start=start, first=first,
                  backend=backend)
