"""Output formats of the last convolution."""

from __future__ import annotations

from ..conv3d import Pixels

UNIT = Pixels(0.5, 0.5, 0.0, 1.0)  # [-1, 1] -> [0, 1]
BYTES = Pixels(127.5, 127.5, 0.0, 255.0)
RAW = Pixels(1.0, 0.0, float("-inf"), float("inf"))
