"""Packed weights as an ExecutionContext reads them; engine/network/ops makes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.conv3d import Weight
from ..kernels.norm_act import Norm


@dataclass(frozen=True)
class Conv:
    """A convolution's packed weight and float32 bias; `key` names its history.

    scale: of its input, if operands are 8 bit wide (operand = real value / scale); gain: [C], factor of each channel of
    the input, used instead. half_accumulate: products may be summed in fp16, a step at a time."""

    key: str
    weight: Weight
    bias: Tensor | None
    scale: float = field(default=1.0, kw_only=True)
    gain: Tensor | None = field(default=None, kw_only=True)
    half_accumulate: bool = field(default=False, kw_only=True)
    #: Stride in frames, rows and columns of the input.
    stride: tuple[int, int, int] = field(default=(1, 1, 1), kw_only=True)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type in which its input is stored."""
        return self.weight.data.dtype

    @property
    def history(self) -> int:
        """Return the number of frames of history that it reads."""
        return self.weight.kernel[0] - 1

    @property
    def out_channels(self) -> int:
        return self.weight.out_channels


@dataclass(frozen=True)
class Output(Conv):
    """The last convolution of a decoder. packed: its `columns_weight`, if it has few outputs."""

    packed: Tensor | None


@dataclass(frozen=True)
class Attention:
    """Projections of attention as (weight [C, C] to multiply from the right, bias), in the activations' type.

    flash: use the kernel that needs no score matrix, not plain products. whole: attend among the positions of all
    frames."""

    norm: Norm
    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    v: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    flash: bool = True
    whole: bool = False
