"""Downsampling by one strided convolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, Partials
from ...options import Options
from ...precision.forms import Operands
from ...runtime.run import Run
from ...runtime.weights import Conv
from ..packed import conv_of
from ..program import CAUSAL, Resampling, Size, Style, Taps, Work
from ..state import State
from .conv import ClipConv, FrameConv, OneConv, conv_work


class Downsample(OneConv):
    """Pad a zero row below and column to the right, then apply a strided conv: (1,3,3) in space, causal (3,3,3) in time
    too.

    reflected: (3,3,3) in any case, and the padding repeats the row and column before the last ones.

    centred: (3,3,3) in any case, with the borders of other convolutions; in time a clip's first frame counts twice, so
    that all later ones are read in pairs with the one before.
    """

    def __init__(
        self, channels: int, temporal: bool, style: Style = CAUSAL, centred: bool = False, conv: str = "conv",
        reflected: bool = False,
    ) -> None:  # fmt: skip
        kernel = (3 if temporal or centred or reflected else 1, 3, 3)
        stride = (2 if temporal else 1, 2, 2)
        around = {"border": style.border} if centred else {"padding": 0}
        super().__init__(
            conv, FrameConv(channels, channels, 3, stride=2) if style.still
            else ClipConv(channels, channels, kernel, stride, head=style.head, **around),
        )  # fmt: skip
        self.temporal, self.centred, self.reflected = temporal, centred, reflected

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        conv = self.convolution
        if not self.centred:
            x = F.pad(x, (0, 1, 0, 1, 0, 0), mode="reflect" if self.reflected else "constant")
        elif self.temporal and conv.starts(state):
            x = torch.cat((x[:, :, :1], x), 2)
        return conv(x, state)


@dataclass(frozen=True)
class StridedDown(Resampling):
    """Downsampling step. centred, reflected: as for Downsample. conv: the convolution's name within the step."""

    name: str
    width: int
    temporal: bool
    centred: bool = False
    conv: str = "conv"
    reflected: bool = False
    space = (1, 2)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Downsample(self.width, self.temporal, style, self.centred, self.conv, self.reflected)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv:
        return conv_of(part(self.name).convolution, operands, normed=False)

    def run(self, packed: Conv, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        if self.centred:
            # The first frame counts twice, as its own partner: the following results start one frame later, not two.
            lead = int(self.temporal and first == 0)
            pieces = [(packed.weight, a, b, 0) for a, b in ((0, lead), (lead, out.shape[0])) if a < b]
            return out, run.conv(packed, x, out, groups=groups, geometry=Geometry(packed.stride), pieces=pieces)
        # The row and column lie below and to the right: taps start inside the border.
        geometry = Geometry(packed.stride, origin=(1, 1))
        # A stride of 2 in time leaves one frame of history where the clip's start has two copies of its first one.
        skip = int(self.temporal and first > 0)
        return out, run.conv(packed, x, out, groups=groups, geometry=geometry, skip=skip)

    def why_not_fused(self, style: Style) -> str | None:
        if self.centred or style.border == ("reflect" if self.reflected else "zero"):
            return None
        return "it downsamples beside another border than its other convolutions have"

    def taps(self, style: Style) -> Taps:
        if self.centred:
            return Taps(3, 0) if self.temporal else Taps(2, 0)
        if self.reflected:
            return Taps(2, 0)
        return Taps(1, 0) if self.temporal else Taps()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        if self.centred:
            return conv_work(size, self.width, 27, self.size(size, True))
        # The input is padded by a row and a column.
        source = size._replace(height=size.height + 1, width=size.width + 1)
        return conv_work(source, self.width, 27 if self.temporal or self.reflected else 9, self.size(size, True))

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.{self.conv}", self.width),)
