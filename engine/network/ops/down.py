"""Downsampling by one strided convolution, or by one of every frame and one in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, pack_weight
from ...kernels.precision import exact_math
from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import COPY, ExecutionContext
from ...runtime.weights import Conv
from ..packed import conv_of
from ..program import Resampling
from ..state import State
from ..values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from .conv import ClipConv, FrameConv, OneConv, conv_work


class Downsample(OneConv):
    """Pad a zero row below and column to the right, then apply a strided conv: (1,3,3) in space, causal (3,3,3) in time
    too.

    reflected: (3,3,3) in any case, and the padding repeats the row and column before the last ones.

    flat: files hold the (1,3,3) convolution as one of pictures.

    centred: (3,3,3) in any case, with the borders of other convolutions; in time, if `doubled`, a clip's first frame
    counts twice, so that all later ones are read in pairs with the one before.
    """

    def __init__(
        self, channels: int, temporal: bool, style: Style = CAUSAL, centred: bool = False, conv: str = "conv",
        reflected: bool = False, flat: bool = False, doubled: bool = True,
    ) -> None:  # fmt: skip
        kernel = (3 if temporal or centred or reflected else 1, 3, 3)
        stride = (2 if temporal else 1, 2, 2)
        around = {"border": style.border} if centred else {"padding": 0}
        super().__init__(
            conv, FrameConv(channels, channels, 3, stride=2) if style.still or flat
            else ClipConv(channels, channels, kernel, stride, head=style.head, **around),
        )  # fmt: skip
        self.temporal, self.centred, self.reflected, self.doubled = temporal, centred, reflected, doubled

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        conv = self.convolution
        if not self.centred:
            x = F.pad(x, (0, 1, 0, 1, 0, 0), mode="reflect" if self.reflected else "constant")
        elif self.temporal and self.doubled and conv.starts(state):
            x = torch.cat((x[:, :, :1], x), 2)
        return conv(x, state)


@dataclass(frozen=True)
class StridedDown(Resampling):
    """Downsampling step. centred, reflected, flat, doubled: as for Downsample. conv: the convolution's name within the
    step."""

    name: str
    width: int
    temporal: bool
    centred: bool = False
    conv: str = "conv"
    reflected: bool = False
    flat: bool = False
    doubled: bool = True
    space = (1, 2)

    @property
    def plain_only(self) -> str | None:  # type: ignore[override]
        return None if self.doubled else "it halves the frame rate from a clip's first frame on"

    def modules(self, style: Style) -> dict[str, nn.Module]:
        how = self.centred, self.conv, self.reflected, self.flat, self.doubled
        return {self.name: Downsample(self.width, self.temporal, style, *how)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv:
        return conv_of(part(self.name).convolution, operands, normed=False)

    def run(self, packed: Conv, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
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


class FrameDownsample(OneConv):
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
        return {self.name: FrameDownsample(self.width, self.temporal)}

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

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        self.onto(packed, run, x, out, first, add=False)
        return out, None

    def onto(self, packed: Packed, run: ExecutionContext, x: Tensor, out: Tensor, first: int, add: bool) -> None:
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
        fits = style.still or style.head == "zero"
        if fits and style.border == "zero":
            return None
        return "its frames are halved behind and beside zeros, other convolutions are not"

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
