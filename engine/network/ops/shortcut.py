"""What steps to another resolution that have a shortcut beside their convolution are alike in."""

from __future__ import annotations

from dataclasses import dataclass

from ..program import Resampling, Size, Style, Taps
from .conv import taps_of


@dataclass(frozen=True)
class Shortcut(Resampling):
    """lead: of the step's module. conv: the convolution's name within the step."""

    name: str
    c_in: int
    c_out: int
    temporal: bool
    lead: bool = True
    conv: str = "conv"

    def leads(self, first: int) -> int:
        """Of frames from `first` on those that are a clip's first one, where that has a way of its own."""
        return int(self.lead and self.temporal and first == 0)

    def size(self, size: Size, starts: bool) -> Size:
        return super().size(size, starts and self.lead)

    def channels(self, channels: int) -> int:
        return self.c_out

    def taps(self, style: Style) -> Taps:
        return taps_of(style)
