"""Weights in the forms the fused operators read, packed once from the plain modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import layers
from ..kernels.conv3d import Weight, pack_weight
from ..kernels.norm_act import Norm
from ..kernels.to_pixels import columns_weight
from ..kernels.upsample import Composed, pack
from ..precision.operands import Balancer, Form, Operands

#: Convolutions of at most this many products per position and tap keep the weights of a clip's first two frames as
#: well: those at 4x and 8x of the published decoder are two thirds of its work and, in fp16, 30 of 246 MB.
EARLY = 512 * 256


@dataclass(frozen=True)
class Conv:
    """A convolution's packed weight and float32 bias; `key` names its history.

    scale: of its input, where operands are 8 bit wide (operand = real value / scale); gain: [C], what each channel of
    it is multiplied by instead. half_accumulate: products may be summed in fp16, a step at a time.
    """

    key: str
    weight: Weight
    bias: Tensor
    scale: float = field(default=1.0, kw_only=True)
    gain: Tensor | None = field(default=None, kw_only=True)
    half_accumulate: bool = field(default=False, kw_only=True)

    @classmethod
    def of(
        cls, conv: layers.CausalConv3d, operands: Operands, *rest: object, normed: bool = True, strided: bool = False
    ) -> Conv:
        """Of a convolution in space and time. rest: the fields that a subclass adds."""
        form = operands.form(conv.key, normed)
        n, c, taps = conv.weight.shape[:3]
        early = taps == 3 and n * c <= EARLY and conv.head == "replicate" and not strided

        def make() -> Conv:
            balancer = form.balancer()
            weight = pack_weight(conv.weight, form.dtype, early=early, balance=balancer)
            return cls(conv.key, weight, conv.bias.float(), *rest, **scaling(form, balancer))

        return operands.once(conv.key, form, make)

    @property
    def dtype(self) -> torch.dtype:
        """What its input is stored in."""
        return self.weight.data.dtype

    @property
    def halo(self) -> int:
        """Frames of history it reads."""
        return self.weight.kernel[0] - 1


@dataclass(frozen=True)
class Output(Conv):
    """The last convolution of a decoder."""

    packed: Tensor

    @classmethod
    def of(cls, conv: layers.CausalConv3d, operands: Operands) -> Output:
        weight = pack_weight(conv.weight, operands.dtype)
        return cls(conv.key, weight, conv.bias.float(), columns_weight(weight))


@dataclass(frozen=True)
class Resnet:
    norm1: Norm
    conv1: Conv
    norm2: Norm
    conv2: Conv
    shortcut: Conv | None

    @classmethod
    def of(cls, block: layers.Resnet, operands: Operands) -> Resnet:
        shortcut = block.conv_shortcut
        return cls(
            norm_of(block.norm1),
            Conv.of(block.conv1, operands),
            norm_of(block.norm2),
            Conv.of(block.conv2, operands),
            None if shortcut is None else Conv.of(shortcut, operands, normed=False),
        )

    @property
    def out_channels(self) -> int:
        return self.conv2.weight.out_channels


@dataclass(frozen=True)
class Attention:
    """Projections as (weight [C, C] to multiply from the right, bias), in the activations' type.

    flash off: plain products instead of the kernel that needs no score matrix.
    """

    norm: Norm
    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    v: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    flash: bool = True

    @classmethod
    def of(cls, block: layers.FrameAttention, dtype: torch.dtype, flash: bool = True) -> Attention:
        q, k, v, out = ((weight.to(dtype).t(), bias.to(dtype)) for weight, bias in block.projections())
        return cls(norm_of(block.norm), q, k, v, out, flash)


@dataclass(frozen=True)
class Upsampler:
    """The composed weights of expansion, shuffle and convolution. The other fields as in Conv."""

    key: str
    composed: Composed
    scale: float = 1.0
    gain: Tensor | None = None
    half_accumulate: bool = False

    @classmethod
    def of(cls, block: layers.Upsample, operands: Operands) -> Upsampler:
        expand, conv = block.upscale_conv, block.conv
        form = operands.form(conv.key, normed=False)

        def make() -> Upsampler:
            balancer = form.balancer()
            composed = pack(expand.weight, expand.bias, conv.weight, conv.bias, form.dtype, balancer)
            return cls(conv.key, composed, **scaling(form, balancer))

        return operands.once(conv.key, form, make)

    @property
    def weight(self) -> Weight:
        return self.composed.weight

    @property
    def dtype(self) -> torch.dtype:
        """What its input is stored in."""
        return self.weight.data.dtype

    @property
    def halo(self) -> int:
        """Frames of history it reads, of the small input."""
        return self.weight.kernel[0] - 1

    @property
    def out_channels(self) -> int:
        return self.weight.out_channels


@dataclass(frozen=True)
class Expansion:
    """An upsampler that is not composed: the 1x1x1 expansion, which stores pixel-shuffled, then the convolution. Both
    in 16 bit under any policy: ranges are known of what the composed one reads."""

    expand: Conv
    conv: Conv

    @classmethod
    def of(cls, block: layers.Upsample, operands: Operands) -> Expansion:
        expand, dtype = block.upscale_conv, operands.dtype
        weight = pack_weight(expand.weight, dtype, (block.z, 2, 2))
        return cls(Conv(expand.key, weight, expand.bias.float()), Conv.of(block.conv, Operands(dtype), normed=False))

    @property
    def out_channels(self) -> int:
        return self.conv.weight.out_channels


@dataclass(frozen=True)
class Downsampler(Conv):
    """A strided convolution; `factor` is its stride in time."""

    factor: int

    @classmethod
    def of(cls, block: layers.Downsample, operands: Operands) -> Downsampler:
        return super().of(block.conv, operands, block.conv.stride[0], normed=False, strided=True)


def scaling(form: Form, balancer: Balancer | None) -> dict[str, Any]:
    """The fields of a Conv that tell how its input is stored."""
    gain = None if balancer is None else balancer.gain
    return {"scale": form.scale, "gain": gain, "half_accumulate": form.half_accumulate}


def norm_of(norm: layers.NormAct | layers.LengthNormAct) -> Norm:
    if isinstance(norm, layers.LengthNormAct):
        return Norm("l2", norm.gamma.flatten().float(), eps=norm.eps)
    return Norm("group", norm.weight.float(), norm.bias.float(), norm.num_groups, norm.eps)


def tensor_bytes(value: object) -> int:
    """Bytes of all distinct tensors in nested dataclasses, lists and tuples."""
    seen: dict[int, int] = {}

    def visit(v: object) -> None:
        if isinstance(v, Tensor):
            seen[id(v)] = v.numel() * v.element_size()
        elif isinstance(v, (list, tuple)):
            for item in v:
                visit(item)
        elif hasattr(v, "__dict__"):
            for item in vars(v).values():
                visit(item)

    visit(value)
    return sum(seen.values())
