"""What steps to another resolution that have a shortcut beside their convolution are alike in."""

from __future__ import annotations

from dataclasses import dataclass

from ..program import Resampling, Size, Style, Taps
from .conv import Between, taps_of


@dataclass(frozen=True)
class Shortcut(Resampling, Between):
    """lead: of the step's module. conv: the convolution's name within the step."""

    temporal: bool
    lead: bool = True
    conv: str = "conv"

    def leads(self, first: int) -> int:
        """Of frames from `first` on those that are a clip's first one, where that has a way of its own."""
        return int(self.lead and self.temporal and first == 0)

    def size(self, size: Size, starts: bool) -> Size:
        return super().size(size, starts and self.lead)

    def taps(self, style: Style) -> Taps:
        return taps_of(style)
