"""Upsampling by repeated or shuffled values and a convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, Weight, pack_weight, padded_channels
from ...kernels.conv3d.types import QUANT_MAX, quantiser
from ...kernels.norm_act import Store, norm_act
from ...kernels.upsample import pack, pack_nearest
from ...options import Options
from ...precision.forms import Balancer, Form, Operands
from ...runtime.context import COPY, ExecutionContext
from ...runtime.rolling import Layer
from ...runtime.weights import Conv
from ..packed import conv_of, packed_conv
from ..program import Resampling
from ..rolling import Layered
from ..state import State
from ..values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from .conv import Between, ClipConv, FrameConv, OneConv, conv_work, styled, taps_of


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
class Separate:
    """The form that is not composed: larger frames, then the convolution of them. expand: a 1x1x1 expansion, which
    stores pixel-shuffled. All is in 16 bit under any policy: calibration measures only the operands of the composed
    form, where the convolution reads the small frames, in phases."""

    conv: Conv
    expand: Conv | None = None


@dataclass(frozen=True)
class _Up(Resampling):
    """Upsampling step; `conv` is the convolution's name within the step."""

    name: str
    width: int
    temporal: bool
    conv: str = "conv"
    space = (2, 1)

    def run(self, packed: Conv | Separate, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None,
            groups: int, first: int) -> Result:  # fmt: skip
        if isinstance(packed, Conv):
            return out, run.conv(packed, x, out, groups=groups, frame=first)
        with run.arena.scope():
            return out, run.conv(packed.conv, self.larger(packed, run, x, out), out, groups=groups)

    def larger(self, packed: Separate, run: ExecutionContext, x: Tensor, out: Tensor) -> Tensor:
        """Return the frames that the convolution reads where it is not composed."""
        raise NotImplementedError

    def taps(self, style: Style) -> Taps:
        # At the rate of the input, where the three frames it reads are at most two.
        return Taps(1, style.after) if self.temporal else taps_of(style)

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.{self.conv}", self.width),)


@dataclass(frozen=True)
class ShuffleUp(_Up):
    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Upsample(self.width, self.temporal, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv | Separate:
        block, dtype = part(self.name), operands.dtype
        expand, conv = block.upscale_conv, block.conv
        if not (options.composed_upsample and conv.head == "replicate" and conv.border == "zero"):
            weight = pack_weight(expand.weight, dtype, (block.z, 2, 2))
            wide = Conv(expand.key, weight, expand.bias.float())
            return Separate(conv_of(conv, Operands(dtype), normed=False), wide)
        form = operands.form(conv.key, normed=False)

        def make(balancer: Balancer | None) -> tuple[Weight, Tensor]:
            made = pack(expand.weight, expand.bias, conv.weight, conv.bias, form.dtype, balancer)
            return made.weight, made.bias

        return operands.once(f"{conv.key} composed", form, lambda: packed_conv(conv.key, form, make))

    def larger(self, packed: Separate, run: ExecutionContext, x: Tensor, out: Tensor) -> Tensor:
        frames = packed.expand.weight.phases[0] * x.shape[0]
        shuffled = run.take(frames, *out.shape[1:3], self.width)
        run.pointwise(packed.expand, x, shuffled)
        if out.shape[0] == frames:
            return shuffled
        if not run.dry:  # the clip's first frame has no second one
            shuffled[1].copy_(shuffled[0])
        return shuffled[1:]

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        out, c = self.size(size, True), self.width
        z, pixels = self.time[0], math.prod(size[:3])
        expand, conv = 2.0 * pixels * c * 4 * z * c, conv_work(out, c)
        # Each of the 4 z phases has 2x2x2 taps on the small input when time grows too (z = 2), else 3x2x2. A clip's
        # first frame has fewer phases; they cost what they produce.
        composed = 2.0 * (8 if z == 2 else 12) * c * math.prod(out)
        return Work(expand + conv.flop, composed, pixels * c + math.prod(out))


class RepeatUpsample(OneConv):
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
class RepeatUp(_Up):
    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: RepeatUpsample(self.width, self.temporal, self.conv, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv | Separate:
        conv = part(self.name).convolution
        if not options.composed_upsample:
            return Separate(conv_of(conv, Operands(operands.dtype), normed=False))
        form = operands.form(conv.key, normed=False)

        def make(balancer: Balancer | None) -> tuple[Weight, Tensor]:
            return pack_nearest(conv.weight, conv.bias, form.dtype, balancer, self.temporal)

        return operands.once(f"{conv.key} composed", form, lambda: packed_conv(conv.key, form, make))

    def larger(self, packed: Separate, run: ExecutionContext, x: Tensor, out: Tensor) -> Tensor:
        repeated, every = run.take(*out.shape), self.time[0]
        if not run.dry:
            lead = int(out.shape[0] < every * x.shape[0])  # the clip's first frame
            inside = repeated.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
            inside[:lead] = x[:lead, :, None, :, None]
            for i in range(every):
                inside[lead + i :: every] = x[lead:, :, None, :, None]
        return repeated

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        out = self.size(size, True)
        plain = conv_work(out, self.width)
        # Two of three taps along a doubled axis read the same value: 2x2x2 are left, or 3x2x2 if the frame rate stays.
        composed = conv_work(out, self.width, 8 if self.temporal else 12)
        return Work(plain.flop, composed.flop, plain.values)


class FrameUpsample(OneConv):
    """Double the frames by `time_conv` if temporal, then double the pixels and apply a 3x3 convolution to every frame.

    A clip's first frame skips time_conv, which sees zeros in its place: T frames become 2T - 1 in the first call, 2T in
    later ones. The first C output channels of time_conv are the earlier frame of each pair.
    """

    def __init__(self, c_in: int, c_out: int, temporal: bool, name: str) -> None:
        """Build the modules; `name` is the file's name of the 3x3 convolution."""
        super().__init__(name, FrameConv(c_in, c_out, 3, padding=1))
        self.time_conv = ClipConv(c_in, 2 * c_in, (3, 1, 1), head="zero") if temporal else None

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if self.time_conv is not None:
            x = self._double_frames(x, state)
        return self.convolution(F.interpolate(x, scale_factor=(1, 2, 2)))

    def _double_frames(self, x: Tensor, state: State | None) -> Tensor:
        lead = x[:, :, : int(self.time_conv.starts(state))]
        x = x[:, :, lead.shape[2] :]
        if x.shape[2] == 0:
            if state is not None:
                state.keep(self.time_conv.key, torch.zeros_like(lead).repeat(1, 1, 2, 1, 1))
            return lead
        pairs = self.time_conv(x, state).unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        return torch.cat((lead, pairs), 2) if lead.shape[2] else pairs


@dataclass(frozen=True)
class Doubled:
    """time: doubles the frames; its first channels are the earlier ones. space: doubles rows and columns, composed into
    phases, or a plain convolution of the doubled frame, which stays in 16 bit under any policy.

    Where space reads int8, time's weights carry the gain of each channel it makes, so that both agree on the operands.
    """

    time: Conv | None
    space: Conv
    composed: bool


@dataclass(frozen=True)
class NearestUp(Resampling, Layered, Between):
    temporal: bool
    conv: str = "resample.1"
    space = (2, 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: FrameUpsample(self.c_in, self.c_out, self.temporal, self.conv)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Doubled:
        block, composed = part(self.name), options.composed_upsample
        conv, time = block.convolution, block.time_conv
        form = operands.form(conv.key, normed=False) if composed else Form(operands.dtype)

        def make(balancer: Balancer | None) -> tuple[Weight, Tensor]:
            weight = conv.weight.unsqueeze(2)
            if composed:
                return pack_nearest(weight, conv.bias, form.dtype, balancer)
            return pack_weight(weight, form.dtype), conv.bias.float()

        def both() -> Doubled:
            space = packed_conv(conv.key, form, make)
            return Doubled(None if time is None else _time_conv(time, operands.dtype, space.gain), space, composed)

        return operands.once(f"{conv.key} composed" if composed else conv.key, form, both)

    def run(self, packed: Doubled, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        if run.still:
            return out, self._still(packed, run, x, out, groups, None)
        self.onto(packed, run, x, out, first, add=False)
        return out, None

    def _still(
        self, packed: Doubled, run: ExecutionContext, x: Tensor, out: Tensor, groups: int, residual: Tensor | None
    ) -> Sums:  # fmt: skip
        """FrameUpsample pictures, band by band like their other convolutions."""
        if packed.composed:
            return run.conv(packed.space, x, out, groups=groups, residual=residual)
        with run.arena.scope():
            frames = run.take(*out.shape[:3], self.c_in)
            if not run.dry:
                frames.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).copy_(x[:, :, None, :, None])
            return run.conv(packed.space, frames, out, groups=groups, residual=residual)

    def layers(self, packed: Doubled, groups: int) -> tuple[Layer, ...]:
        return (Layer(packed.space, COPY, groups),) if packed.composed and packed.time is None else ()

    def onto(self, packed: Doubled, run: ExecutionContext, x: Tensor, out: Tensor, first: int, add: bool) -> None:
        """Write x [D, H, W, C], overwritten, to out [F, 2H, 2W, K], or add it to `out` (`add`)."""
        if run.still:
            self._still(packed, run, x, out, 0, out if add else None)
            return
        h, w, c = x.shape[1:]
        time, space, f = packed.time, packed.space, out.shape[0]
        lead = int(first == 0 and self.temporal)
        if packed.composed:
            buffer, inside = _bordered(run, f, h, w, c, space.dtype)
            copied = x if time is None else x[:lead]
            if copied.shape[0] and not run.dry:
                store = Store(silu=False, scale=space.scale, gain=space.gain)
                run.attempt(norm_act, copied, COPY, buffer[: copied.shape[0]], store=store, health=run.health)
            if time is not None:
                _double_frames(run, time, x, inside, lead, space.scale)
        else:
            frames = x
            if time is not None:
                frames = run.take(f, h, w, c)
                frames[:lead].copy_(x[:lead])
                _double_frames(run, time, x, frames, lead)
            buffer, inside = _bordered(run, f, 2 * h, 2 * w, c, space.dtype)
            inside.unflatten(1, (h, 2)).unflatten(3, (w, 2)).copy_(frames[:, :, None, :, None])
        run.buffered(space, buffer, inside, out, out if add else None)

    def why_not_fused(self, style: Style) -> str | None:
        fits = style.still or style.head == "zero" or not self.temporal
        if fits and style.border == "zero":
            return None
        return "its frames are doubled behind and beside zeros, other convolutions are not"

    def taps(self, style: Style) -> Taps:
        return Taps(2, 0) if self.temporal else Taps()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        out = self.size(size, True)
        total = conv_work(out._replace(channels=self.c_in), self.c_out, 9)
        if self.temporal:
            later = size._replace(frames=size.frames - 1)
            total += conv_work(later, 2 * self.c_in, 3)
        return total

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.{self.conv}", min(self.c_in, self.c_out)),)


def _time_conv(conv: ClipConv, dtype: torch.dtype, gain: Tensor | None) -> Conv:
    """Pack time_conv; `gain` [C] is a factor for each channel of a frame."""
    weight, bias = conv.weight.float(), conv.bias.float()
    if gain is not None:
        weight, bias = weight * gain.repeat(2)[:, None, None, None, None], bias * gain.repeat(2)
    return Conv(conv.key, pack_weight(weight, dtype, (2, 1, 1)), bias)


def _double_frames(run: ExecutionContext, time: Conv, x: Tensor, out: Tensor, lead: int, scale: float = 1.0) -> None:
    """Write x [D, H, W, C], overwritten, to out [2D, H, W, C] after its first `lead` frames. lead = 1: at the clip's
    start, whose first frame skips the convolution, which sees zeros in its place. scale: of an 8-bit `out`."""
    x[:lead].zero_()
    pixels = quantiser(out.dtype, scale) if out.dtype in QUANT_MAX else None
    run.conv(time, x, out[lead:], geometry=Geometry(origin=(1, 1)), skip=lead, pixels=pixels)


def _bordered(run: ExecutionContext, f: int, h: int, w: int, c: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an operand buffer [f, h + 2, w + 2, C padded], zero outside its inside [f, h, w, c], and the inside."""
    buffer = run.arena.take((f, h + 2, w + 2, padded_channels(c, dtype)), dtype)
    for edge in (buffer[:, 0], buffer[:, -1], buffer[:, :, 0], buffer[:, :, -1], buffer[..., c:]):
        edge.zero_()
    return buffer, buffer[:, 1:-1, 1:-1, :c]
