"""Upsampling by repetition and a 3x3 convolution of every frame, after a convolution that doubles the frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, Partials, pack_weight, padded_channels
from ...kernels.conv3d.types import QUANT_MAX, quantiser
from ...kernels.norm_act import Store, norm_act
from ...kernels.upsample import pack_nearest
from ...options import Options
from ...precision.forms import Form, Operands
from ...runtime.rolling import Layer
from ...runtime.run import COPY, Run
from ...runtime.weights import Conv
from ..packed import scaling
from ..program import CAUSAL, Resampling, Size, Style, Taps, Work
from ..rolling import Layered
from ..state import State
from .conv import Between, ClipConv, FrameConv, OneConv, conv_work


class Upsample(OneConv):
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
class Packed:
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
        return {self.name: Upsample(self.c_in, self.c_out, self.temporal, self.conv)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        block, composed = part(self.name), options.composed_upsample
        conv, time = block.convolution, block.time_conv
        form = operands.form(conv.key, normed=False) if composed else Form(operands.dtype)

        def make() -> Packed:
            balancer = form.balancer()
            if composed:
                space = Conv(conv.key, *pack_nearest(conv.weight.unsqueeze(2), conv.bias, form.dtype, balancer),
                             **scaling(form, balancer))  # fmt: skip
            else:
                space = Conv(conv.key, pack_weight(conv.weight.unsqueeze(2), form.dtype), conv.bias.float())
            return Packed(None if time is None else _time_conv(time, operands.dtype, space.gain), space, composed)

        return operands.once(f"{conv.key} composed" if composed else conv.key, form, make)

    def run(self, packed: Packed, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        if run.still:
            return out, self._still(packed, run, x, out, groups)
        self.onto(packed, run, x, out, first, add=False)
        return out, None

    def _still(self, packed: Packed, run: Run, x: Tensor, out: Tensor, groups: int) -> Partials | None:
        """Upsample pictures, band by band like their other convolutions."""
        if packed.composed:
            return run.conv(packed.space, x, out, groups=groups)
        with run.arena.scope():
            frames = run.take(*out.shape[:3], self.c_in)
            if not run.dry:
                frames.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).copy_(x[:, :, None, :, None])
            return run.conv(packed.space, frames, out, groups=groups)

    def layers(self, packed: Packed, groups: int) -> tuple[Layer, ...]:
        return (Layer(packed.space, COPY, groups),) if packed.composed and packed.time is None else ()

    def onto(self, packed: Packed, run: Run, x: Tensor, out: Tensor, first: int, add: bool) -> None:
        """Write x [D, H, W, C], overwritten, to out [F, 2H, 2W, K], or add it to `out` (`add`)."""
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
        fits = style.still or style.head == "zero"
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


def _double_frames(run: Run, time: Conv, x: Tensor, out: Tensor, lead: int, scale: float = 1.0) -> None:
    """Write x [D, H, W, C], overwritten, to out [2D, H, W, C] after its first `lead` frames. lead = 1: at the clip's
    start, whose first frame skips the convolution, which sees zeros in its place. scale: of an 8-bit `out`."""
    x[:lead].zero_()
    pixels = quantiser(out.dtype, scale) if out.dtype in QUANT_MAX else None
    run.conv(time, x, out[lead:], geometry=Geometry(origin=(1, 1)), skip=lead, pixels=pixels)


def _bordered(run: Run, f: int, h: int, w: int, c: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an operand buffer [f, h + 2, w + 2, C padded], zero outside its inside [f, h, w, c], and the inside."""
    buffer = run.arena.take((f, h + 2, w + 2, padded_channels(c, dtype)), dtype)
    for edge in (buffer[:, 0], buffer[:, -1], buffer[:, :, 0], buffer[:, :, -1], buffer[..., c:]):
        edge.zero_()
    return buffer, buffer[:, 1:-1, 1:-1, :c]
