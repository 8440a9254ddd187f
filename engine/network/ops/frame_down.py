"""Downsampling by a strided 3x3 convolution of every frame and one in time that halves the frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, Partials, pack_weight
from ...kernels.precision import exact_math
from ...options import Options
from ...precision.forms import Operands
from ...runtime.run import COPY, Run
from ...runtime.weights import Conv
from ..program import CAUSAL, Resampling, Size, Style, Taps, Work
from ..state import State
from .conv import ClipConv, FrameConv, OneConv, conv_work


class Downsample(OneConv):
    """Pad a zero row below and column to the right, then apply a strided 3x3 convolution to every frame; if temporal,
    time_conv makes one frame of the two new ones and the one before. A clip's first frame skips time_conv."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__("resample.1", FrameConv(channels, channels, 3, stride=2))
        self.time_conv = ClipConv(channels, channels, (3, 1, 1), (2, 1, 1), head="none") if temporal else None

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        x = self.convolution(F.pad(x, (0, 1, 0, 1)))
        if self.time_conv is None:
            return x
        if not self.time_conv.starts(state):
            return self.time_conv(x, state)
        lead = x[:, :, :1].clone()
        if x.shape[2] == 1:
            if state is not None:
                state.keep(self.time_conv.key, lead)
            return lead
        return torch.cat((lead, self.time_conv(x, state)), 2)


@dataclass(frozen=True)
class Packed:
    """both: the convolutions in space and time as one. lead: the one in space, for a clip's first frame, which skips
    the other; None if the frame rate stays."""

    both: Conv
    lead: Conv | None


@dataclass(frozen=True)
class FrameDown(Resampling):
    name: str
    width: int
    temporal: bool
    space = (1, 2)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Downsample(self.width, self.temporal)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        block, dtype = part(self.name), operands.dtype
        conv, time = block.convolution, block.time_conv
        lead = Conv(conv.key, pack_weight(conv.weight.unsqueeze(2), dtype), conv.bias.float(), stride=(1, 2, 2))
        if time is None:
            return Packed(lead, None)
        taps = time.weight.float().flatten(2)
        with exact_math(taps.device):
            kernel = torch.einsum("kmt,mcyx->kctyx", taps, conv.weight.float())
            bias = time.bias.float() + taps.sum(2) @ conv.bias.float()
        return Packed(Conv(time.key, pack_weight(kernel, dtype), bias, stride=(2, 2, 2)), lead)

    def run(self, packed: Packed, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        self.onto(packed, run, x, out, first, add=False)
        return out, None

    def onto(self, packed: Packed, run: Run, x: Tensor, out: Tensor, first: int, add: bool) -> None:
        """Write x [F, H, W, C] to `out` at half the size (and frame rate), or add it to `out` (`add`)."""
        # The zero row and column lie below and to the right: taps start inside the border.
        geometry = Geometry(packed.both.stride, origin=(1, 1))
        factor, lead = packed.both.stride[0], int(first == 0 and self.temporal)
        for i in run.inputs(packed.both, x, COPY, None, out.shape[1], geometry):
            rows = i.rows(out)
            # A stride of 2 in time leaves one frame of history, and the clip's start none.
            start = (i.start + (2 if lead else factor - 1)) % i.data.shape[0]
            for conv, part in ((packed.lead, rows[:lead]), (packed.both, rows[lead:])):
                if part.shape[0]:
                    run.product(conv, i.data, part, geometry=i.geometry, residual=part if add else None, start=start)

    def why_not_fused(self, style: Style) -> str | None:
        fits = style.head == "zero" and style.border == "zero"
        return None if fits else "its frames are halved behind and beside zeros, other convolutions are not"

    def taps(self, style: Style) -> Taps:
        return Taps(1, 0) if self.temporal else Taps()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        # The input is padded by a row and a column.
        source = size._replace(height=size.height + 1, width=size.width + 1)
        small = size._replace(height=size.height // 2, width=size.width // 2)
        total = conv_work(source, self.width, 9, small)
        if self.temporal and size.frames > 1:
            total += conv_work(small, self.width, 3, small._replace(frames=(size.frames - 1) // 2))
        return total
