"""The common part of resampling steps that have a shortcut around their convolution."""

from __future__ import annotations

from dataclasses import dataclass

from ..program import Resampling, Size, Style, Taps
from .conv import Between, taps_of


@dataclass(frozen=True)
class Shortcut(Resampling, Between):
    """lead: a clip's first frame is treated separately by the step's module. conv: the convolution's name within the
    step."""

    temporal: bool
    lead: bool = True
    conv: str = "conv"

    def leads(self, first: int) -> int:
        """Return 1 if the frame `first` is a clip's first one and is treated separately, else 0."""
        return int(self.lead and self.temporal and first == 0)

    def size(self, size: Size, starts: bool) -> Size:
        return super().size(size, starts and self.lead)

    def taps(self, style: Style) -> Taps:
        return taps_of(style)
