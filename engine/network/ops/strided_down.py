"""Downsampling by one strided convolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, Partials
from ...operands.forms import Operands
from ...options import Options
from ...run.run import Run
from ...run.weights import Conv
from ..packed import conv_of
from ..program import CAUSAL, Resampling, Size, Style, Taps, Work
from ..state import State
from .conv import ClipConv, FrameConv, conv_work


class Downsample(nn.Module):
    """Zero row below and column to the right, then a strided conv: (1,3,3) in space, causal (3,3,3) in time too."""

    def __init__(self, channels: int, temporal: bool, style: Style = CAUSAL) -> None:
        super().__init__()
        if style.still:
            self.conv = FrameConv(channels, channels, 3, stride=2)
            return
        kt = 3 if temporal else 1
        stride = (2 if temporal else 1, 2, 2)
        self.conv = ClipConv(channels, channels, (kt, 3, 3), stride, padding=0, head=style.head)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)), state)


@dataclass(frozen=True)
class StridedDown(Resampling):
    name: str
    width: int
    temporal: bool
    space = (1, 2)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Downsample(self.width, self.temporal, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv:
        return conv_of(part(self.name).conv, operands, normed=False)

    def run(self, packed: Conv, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        # The zero row and column lie below and to the right: taps start inside the border.
        geometry = Geometry(packed.stride, origin=(1, 1))
        # A stride of 2 in time leaves one frame of history where the clip's start has two copies of its first one.
        skip = int(self.temporal and first > 0)
        return out, run.conv(packed, x, out, groups=groups, geometry=geometry, skip=skip)

    def why_not_fused(self, style: Style) -> str | None:
        return None if style.border == "zero" else "it downsamples beside zeros, other convolutions do not"

    def taps(self, style: Style) -> Taps:
        return Taps(1, 0) if self.temporal else Taps()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        # What it reads has another row and column.
        source = size._replace(height=size.height + 1, width=size.width + 1)
        return conv_work(source, self.width, 27 if self.temporal else 9, self.size(size, True))

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.conv", self.width),)
