"""Upsampling by repetition in space (and time) and a 3x3x3 convolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ...kernels.conv3d import Partials
from ...kernels.upsample import pack_nearest
from ...options import Options
from ...precision.forms import Operands
from ...runtime.run import Run
from ...runtime.weights import Conv
from ..packed import conv_of, scaling
from ..program import CAUSAL, Resampling, Size, Style, Taps, Work
from ..state import State
from .conv import OneConv, conv_work, styled, taps_of


class Upsample(OneConv):
    """Repeat every value twice in height and width, and in time if `temporal`, then apply a 3x3x3 convolution.

    A clip's first frame is not repeated in time: T frames become 2T - 1 in the first call and 2T in later ones.
    """

    def __init__(self, channels: int, temporal: bool, conv: str, style: Style = CAUSAL) -> None:
        super().__init__(conv, styled(channels, channels, style))
        self.z = 2 if temporal else 1

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        lead, (b, c, t, h, w) = int(self.z == 2 and self.convolution.starts(state)), x.shape
        x = x[:, :, :, None, :, None, :, None].expand(b, c, t, self.z, h, 2, w, 2)
        return self.convolution(x.reshape(b, c, t * self.z, 2 * h, 2 * w)[:, :, lead:], state)


@dataclass(frozen=True)
class Packed:
    """composed: the convolution reads the input itself, in phases; else it reads repeated values, in 16 bit under any
    policy."""

    conv: Conv
    composed: bool


@dataclass(frozen=True)
class RepeatUp(Resampling):
    """Upsampling step; `conv` is the convolution's name within the step."""

    name: str
    width: int
    temporal: bool
    conv: str = "conv"
    space = (2, 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Upsample(self.width, self.temporal, self.conv, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        conv = part(self.name).convolution
        if not options.composed_upsample:
            return Packed(conv_of(conv, Operands(operands.dtype), normed=False), False)
        form = operands.form(conv.key, normed=False)

        def make() -> Packed:
            balancer = form.balancer()
            made = pack_nearest(conv.weight, conv.bias, form.dtype, balancer, self.temporal)
            return Packed(Conv(conv.key, *made, **scaling(form, balancer)), True)

        return operands.once(f"{conv.key} composed", form, make)

    def run(self, packed: Packed, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        if packed.composed:
            return out, run.conv(packed.conv, x, out, groups=groups, frame=first)
        with run.arena.scope():
            repeated = run.take(*out.shape)
            if not run.dry:
                lead = int(out.shape[0] < self.time[0] * x.shape[0])  # the clip's first frame
                inside = repeated.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
                inside[:lead] = x[:lead, :, None, :, None]
                for i in range(self.time[0]):
                    inside[lead + i :: self.time[0]] = x[lead:, :, None, :, None]
            return out, run.conv(packed.conv, repeated, out, groups=groups)

    def taps(self, style: Style) -> Taps:
        # At the rate of the input, where the three frames it reads are at most two.
        return Taps(1, style.after) if self.temporal else taps_of(style)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        out = self.size(size, True)
        plain = conv_work(out, self.width)
        # Two of three taps along a doubled axis read the same value: 2x2x2 are left, or 3x2x2 if the frame rate stays.
        composed = conv_work(out, self.width, 8 if self.temporal else 12)
        return Work(plain.flop, composed.flop, plain.values)

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.{self.conv}", self.width),)
