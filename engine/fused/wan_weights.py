"""Packed weights of Wan's levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.conv3d import Weight, pack_weight
from ..kernels.precision import exact_math
from ..kernels.upsample import pack_nearest
from ..layers import CausalConv3d, FrameConv
from ..models import wan
from ..precision.operands import Form, Operands
from .weights import Conv, Resnet, scaling


@dataclass(frozen=True)
class Linear:
    """A 1x1x1 convolution in fp32: the few channels at the latent, where rounding would be compounded."""

    weight: Tensor  # [C, K]
    bias: Tensor

    @classmethod
    def of(cls, conv: CausalConv3d) -> Linear:
        return cls(conv.weight.float().flatten(1).t().contiguous(), conv.bias.float())

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """[D, h, w, C] -> out [D, h, w, K] in fp32, frame by frame: the same product whatever the chunk."""
        for source, target in zip(x, out, strict=True):
            torch.addmm(self.bias, source.reshape(-1, x.shape[3]), self.weight, out=target.view(-1, out.shape[3]))


@dataclass(frozen=True)
class Up:
    """time: doubles the frames, its first channels being the earlier ones. space: doubles rows and columns, composed
    into phases, or a plain convolution of the doubled frame, which stays in 16 bit under any policy.

    Where space reads int8, time's weights carry the gain of each channel it makes: both ends agree on the operands.
    """

    time: Conv | None
    space: Conv
    composed: bool

    @classmethod
    def of(cls, step: wan.Upsample, operands: Operands, composed: bool) -> Up:
        conv, time = step.resample["1"], step.time_conv
        form = operands.form(conv.key, normed=False) if composed else Form(operands.dtype)

        def make() -> Up:
            balancer = form.balancer()
            if composed:
                space = Conv(conv.key, *pack_nearest(conv.weight, conv.bias, form.dtype, balancer),
                             **scaling(form, balancer))  # fmt: skip
            else:
                space = _frame_conv(conv, form.dtype)
            return cls(None if time is None else _time_conv(time, operands.dtype, space.gain), space, composed)

        return operands.once(f"{conv.key} composed" if composed else conv.key, form, make)

    @property
    def out_channels(self) -> int:
        return self.space.weight.out_channels


@dataclass(frozen=True)
class Down(Conv):
    """A strided convolution; with the time_conv behind it composed into one where frames are halved, too.

    lead: what makes the clip's first frame of its first one alone, which passes by the time_conv.
    """

    factor: int
    lead: Conv | None

    @classmethod
    def of(cls, step: wan.Downsample, dtype: torch.dtype) -> Down:
        conv, time = step.resample["1"], step.time_conv
        lead = _frame_conv(conv, dtype)
        if time is None:
            return cls(lead.key, lead.weight, lead.bias, 1, None)
        taps = time.weight.float().flatten(2)
        with exact_math(taps.device):
            kernel = torch.einsum("kmt,mcyx->kctyx", taps, conv.weight.float())
            bias = time.bias.float() + taps.sum(2) @ conv.bias.float()
        return cls(time.key, pack_weight(kernel, dtype), bias, 2, lead)


@dataclass(frozen=True)
class Average:
    """Wan 2.2's shortcut around a downsampling level as a strided convolution. lead: without the earlier frame, which
    is zero for a clip's first one."""

    weight: Weight
    lead: Weight
    stride: tuple[int, int, int]

    @classmethod
    def of(cls, c_in: int, level: wan.DownLevel, dtype: torch.dtype, device: torch.device) -> Average:
        z, s = (2 if level.temporal else 1), (1 if level.step is None else 2)
        group = c_in * z * s * s // level.width
        samples = torch.arange(c_in * z * s * s, device=device) // group
        kernel = F.one_hot(samples, level.width).t().reshape(level.width, c_in, z, s, s) / group
        return cls(pack_weight(kernel, dtype), pack_weight(kernel[:, :, z - 1 :], dtype), (z, s, s))


@dataclass(frozen=True)
class UpLevel:
    resnets: list[Resnet]
    up: Up | None
    shortcut: bool

    @classmethod
    def of(cls, level: wan.UpLevel, operands: Operands, composed: bool) -> UpLevel:
        resnets = [Resnet.of(r, operands) for r in level.resnets]
        return cls(resnets, level.step and Up.of(level.step, operands, composed), level.shortcut)


@dataclass(frozen=True)
class DownLevel:
    resnets: list[Resnet]
    down: Down | None
    average: Average | None

    @classmethod
    def of(cls, level: wan.DownLevel, operands: Operands) -> DownLevel:
        conv, dtype = level.resnets[0].conv1, operands.dtype
        average = Average.of(conv.in_channels, level, dtype, conv.weight.device) if level.shortcut else None
        resnets = [Resnet.of(r, operands) for r in level.resnets]
        return cls(resnets, level.step and Down.of(level.step, dtype), average)

    @property
    def out_channels(self) -> int:
        return self.resnets[-1].out_channels


def _time_conv(conv: CausalConv3d, dtype: torch.dtype, gain: Tensor | None) -> Conv:
    """gain: [C], what each channel of a frame is multiplied by."""
    weight, bias = conv.weight.float(), conv.bias.float()
    if gain is not None:
        weight, bias = weight * gain.repeat(2)[:, None, None, None, None], bias * gain.repeat(2)
    return Conv(conv.key, pack_weight(weight, dtype, (2, 1, 1)), bias)


def _frame_conv(conv: FrameConv, dtype: torch.dtype) -> Conv:
    return Conv(conv.key, pack_weight(conv.weight.unsqueeze(2), dtype), conv.bias.float())
