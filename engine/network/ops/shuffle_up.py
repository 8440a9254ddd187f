"""Upsampling by a 1x1x1 expansion, a pixel shuffle and a 3x3x3 convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels.conv3d import Partials, pack_weight
from ...kernels.upsample import pack
from ...options import Options
from ...precision.forms import Operands
from ...runtime.run import Run
from ...runtime.weights import Conv
from ..packed import conv_of, scaling
from ..program import CAUSAL, Resampling, Size, Style, Taps, Work
from ..state import State
from .conv import ClipConv, conv_work, styled, taps_of


class Upsample(nn.Module):
    """Apply a 1x1x1 expansion, a pixel shuffle (x2 in height and width, and in time if `temporal`), a 3x3x3
    convolution.

    The expansion's output channel is ((row * 2 + column) * z + frame) * C + c. A clip's first latent has no second
    frame: T latents become 2T - 1 frames in the first call and 2T in later ones.
    """

    def __init__(self, channels: int, temporal: bool, style: Style = CAUSAL) -> None:
        super().__init__()
        self.z = 2 if temporal else 1
        self.upscale_conv = ClipConv(channels, channels * 4 * self.z, (1, 1, 1))
        self.conv = styled(channels, channels, style)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        starts = self.conv.starts(state)
        b, c, t, h, w = x.shape
        x = self.upscale_conv(x).view(b, 2, 2, self.z, c, t, h, w)
        x = x.permute(0, 4, 5, 3, 6, 1, 7, 2).reshape(b, c, t * self.z, 2 * h, 2 * w)
        if starts and self.z == 2:
            x = torch.cat((x[:, :, :1], x[:, :, 2:]), 2)
        return self.conv(x, state)


@dataclass(frozen=True)
class Expansion:
    """The form that is not composed: the 1x1x1 expansion, which stores pixel-shuffled, then the convolution. Both are
    in 16 bit under any policy: calibration measures only the operands of the composed form."""

    expand: Conv
    conv: Conv


@dataclass(frozen=True)
class ShuffleUp(Resampling):
    name: str
    width: int
    temporal: bool
    space = (2, 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Upsample(self.width, self.temporal, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv | Expansion:
        block, dtype = part(self.name), operands.dtype
        expand, conv = block.upscale_conv, block.conv
        if not (options.composed_upsample and conv.head == "replicate" and conv.border == "zero"):
            weight = pack_weight(expand.weight, dtype, (block.z, 2, 2))
            wide = Conv(expand.key, weight, expand.bias.float())
            return Expansion(wide, conv_of(conv, Operands(dtype), normed=False))
        form = operands.form(conv.key, normed=False)

        def make() -> Conv:
            balancer = form.balancer()
            made = pack(expand.weight, expand.bias, conv.weight, conv.bias, form.dtype, balancer)
            return Conv(conv.key, made.weight, made.bias, **scaling(form, balancer))

        return operands.once(f"{conv.key} composed", form, make)

    def run(self, packed: Conv | Expansion, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None,
            groups: int, first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        if isinstance(packed, Conv):
            return out, run.conv(packed, x, out, groups=groups, frame=first)
        with run.arena.scope():
            frames = packed.expand.weight.phases[0] * x.shape[0]
            shuffled = run.take(frames, *out.shape[1:3], self.width)
            run.pointwise(packed.expand, x, shuffled)
            if out.shape[0] < frames:  # the clip's first frame has no second one
                if not run.dry:
                    shuffled[1].copy_(shuffled[0])
                shuffled = shuffled[1:]
            return out, run.conv(packed.conv, shuffled, out, groups=groups)

    def taps(self, style: Style) -> Taps:
        # At the rate of the input, where the three frames it reads are at most two.
        return Taps(1, style.after) if self.temporal else taps_of(style)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        out, c = self.size(size, True), self.width
        z, pixels = self.time[0], math.prod(size[:3])
        expand, conv = 2.0 * pixels * c * 4 * z * c, conv_work(out, c)
        # Each of the 4 z phases has 2x2x2 taps on the small input when time grows too (z = 2), else 3x2x2. A clip's
        # first frame has fewer phases; they cost what they produce.
        composed = 2.0 * (8 if z == 2 else 12) * c * math.prod(out)
        return Work(expand + conv.flop, composed, pixels * c + math.prod(out))

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.conv", self.width),)
