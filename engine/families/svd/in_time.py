"""Convolutions in time alone that see a whole clip, both directions: residual blocks beside those of single frames, and
a last convolution after the one to pixels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels import norm_act
from ...kernels.conv3d import Weight, pack_weight
from ...kernels.to_pixels import RAW
from ...kernels.to_pixels import Pixels as Form
from ...network.ops import ends
from ...network.ops.conv import ClipConv, FrameConv, conv_work
from ...network.ops.norm import Group
from ...network.packed import norm_of, packed_conv
from ...network.program import Step
from ...network.state import State
from ...network.tree import find, graft
from ...network.values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from ...options import Options
from ...precision.forms import Balancer, Operands
from ...runtime.context import ExecutionContext
from ...runtime.rolling import Layer
from ...runtime.weights import Conv
from .memory import through_time

TIME = (3, 1, 1)
PARTS = ("in_layers.0", "in_layers.2", "out_layers.0", "out_layers.3")


def time_conv(c_in: int, c_out: int) -> ClipConv:
    """Return a convolution of a frame and its neighbours in time, with zeros beyond the clip's ends."""
    return ClipConv(c_in, c_out, TIME, head="zero", after=1)


class TimeStack(nn.Module):
    """y = conv2(norm2(conv1(norm1(x)))), convolutions in time and norms of the whole clip with SiLU. Frames wait until
    the clip ends; `forward` returns all of them, x + share * y."""

    key = ""

    def __init__(self, channels: int, norm: Group) -> None:
        super().__init__()
        for i, name in enumerate(PARTS):
            graft(self, name, time_conv(channels, channels) if i % 2 else norm.module(channels))

    def parts(self) -> list[nn.Module]:
        """Return norm1, conv1, norm2, conv2."""
        return [find(self, name) for name in PARTS]

    def forward(self, x: Tensor, share: Tensor, state: State | None = None) -> Tensor:
        if state is not None:
            if not state.ending:
                state.waiting[self.key].append(x)
                return x.new_empty(*x.shape[:2], 0, *x.shape[3:])
            x = torch.cat((*state.waiting.pop(self.key, ()), x), 2)
        y = x
        for part in self.parts():
            y = part(y)
        return torch.addcmul(x, y, share.to(x))


@dataclass(frozen=True)
class Packed:
    norm1: norm_act.Norm
    conv1: Conv
    norm2: norm_act.Norm
    conv2: Conv


@dataclass(frozen=True)
class TimeRes(Step):
    """A residual block in time. mix: name of the parameter whose sigmoid is the share of its result."""

    name: str
    mix: str
    width: int
    norm: Group
    in_place = True
    late = waits = True

    @property
    def groups(self) -> int:  # type: ignore[override]
        return self.norm.groups

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: TimeStack(self.width, self.norm), self.mix: nn.Parameter(torch.zeros(1))}  # type: ignore[dict-item]

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        return part(self.name)(x, _share(part(self.mix)), state)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        norm1, conv1, norm2, conv2 = part(self.name).parts()
        share = _share(part(self.mix))
        return Packed(norm_of(norm1), _conv_of(conv1, operands), norm_of(norm2), _conv_of(conv2, operands, share))

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        """Add the block's result to x, all frames of a clip. A plan that spares memory makes the tensor between the
        convolutions twice."""
        layers = Layer(packed.conv1, packed.norm1, self.groups), Layer(packed.conv2, packed.norm2, groups)
        with run.arena.scope():
            return x, through_time(run, layers, x, sums, None if run.spares else run.take(*x.shape))

    def taps(self, style: Style) -> Taps:
        return Taps(math.inf, math.inf)

    def channels(self, channels: int) -> int:
        return self.width

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.width, 3) + conv_work(size, self.width, 3)


def _share(mix: Tensor) -> Tensor:
    return mix.float().sigmoid()


def _conv_of(conv: ClipConv, operands: Operands, share: Tensor | None = None) -> Conv:
    """Pack a convolution in time. share: factor of its results."""
    form, factor = operands.form(conv.key, normed=True), 1.0 if share is None else share

    def make(balancer: Balancer | None) -> tuple[Weight, Tensor]:
        return pack_weight(conv.weight.float() * factor, form.dtype, balance=balancer), conv.bias.float() * factor

    return operands.once(conv.key, form, lambda: packed_conv(conv.key, form, make))


class FramesThenTime(FrameConv):
    """A 3x3 convolution of every frame, then one of its results in time."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__(c_in, c_out, 3, padding=1)
        self.time_mix_conv = time_conv(c_out, c_out)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.time_mix_conv(super().forward(x), state)


@dataclass(frozen=True)
class PackedPixels:
    """frames: the norm and the convolution of every frame. taps: [3, C, C] fp32, from the frame before, the own and the
    next one; bias: [C]."""

    frames: ends.PackedEnd
    taps: Tensor
    bias: Tensor


@dataclass(frozen=True)
class TimePixels(ends.Pixels):
    """The step to pixels, whose values a convolution in time mixes, in fp32."""

    late = True  # type: ignore[assignment]

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.norm_name: self.norm.module(self.c_in), self.name: FramesThenTime(self.c_in, self.c_out)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> PackedPixels:
        time = part(self.name).time_mix_conv
        taps = time.weight.float()[..., 0, 0].permute(2, 1, 0).contiguous()
        return PackedPixels(super().pack(part, operands, options), taps, time.bias.float())

    def store(self, packed: PackedPixels, run: ExecutionContext, x: Tensor, sums: Sums,
              output: torch.dtype, form: Form) -> Tensor:  # fmt: skip
        """Return finished pixels [T, H, W, colours] of type `output` for x [T, H, W, C], all frames of a clip."""
        frames, h, w, _ = x.shape
        out, end = run.arena.take((frames, h, w, self.colours), output), packed.frames
        with run.arena.scope():
            raw = run.arena.take(tuple(out.shape), torch.float32)
            mixed = run.arena.take((h * w, self.colours), torch.float32)
            run.pixels(end.conv, x, end.norm, sums, raw, RAW)
            for i in range(frames) if not run.dry else ():
                mixed.copy_(packed.bias.expand_as(mixed))
                for tap, at in enumerate(range(i - 1, i + 2)):
                    if 0 <= at < frames:
                        run.attempt(mixed.addmm_, raw[at].view(h * w, -1), packed.taps[tap])
                run.inspect(mixed)
                mixed.mul_(form.gain).add_(form.offset).clamp_(form.low, form.high)
                out[i].view(h * w, -1).copy_(mixed if output.is_floating_point else mixed.round_())
        return out

    def ahead(self, packed: PackedPixels) -> tuple[str, ...]:
        return ()

    def taps(self, style: Style) -> Taps:
        return Taps(1, 1)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return super().work(size, style) + conv_work(size._replace(channels=self.colours), self.colours, 3)
