"""Output formats of the last convolution."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pixels:
    """stored = clamp(value * gain + offset, low, high), a uint8 result is rounded. Defaults: [-1, 1] -> [0, 1]."""

    gain: float = 0.5
    offset: float = 0.5
    low: float = 0.0
    high: float = 1.0


UNIT = Pixels()
BYTES = Pixels(127.5, 127.5, 0.0, 255.0)
RAW = Pixels(1.0, 0.0, float("-inf"), float("inf"))
