"""Group norms that the latent scales and shifts, position by position, and the convolution that lets them see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.norm_act import Condition, latent_of_frame
from ...network.ops import conv
from ...network.ops.conv import ClipConv, OneConv
from ...network.ops.norm import GroupNormAct
from ...network.state import State
from ...network.values import Result, Sums
from ...runtime.context import ExecutionContext

#: Name under which a State holds a clip's latents.
LATENTS = "latents"


class SpatialNormAct(nn.Module):
    """GroupNorm over all frames of a call, times one 1x1x1 convolution of the latent and plus another, then SiLU unless
    off. Every position takes the latent pixel it lies in, every frame its latent.

    rate: frames per latent.
    """

    def __init__(self, channels: int, groups: int, latent: int, rate: int, act: bool = True) -> None:
        super().__init__()
        self.norm_layer = GroupNormAct(channels, groups, act=False, chunk="piece")
        self.conv_y = OneConv("conv", ClipConv(latent, channels, (1, 1, 1)))
        self.conv_b = OneConv("conv", ClipConv(latent, channels, (1, 1, 1)))
        self.act, self.rate, self.key = act, rate, ""

    def forward(self, x: Tensor, state: State) -> Tensor:
        z, y, first = state.constants[LATENTS], self.norm_layer(x), state.count(self.key, x)
        taken = [latent_of_frame(first + i, self.rate, z.shape[2]) for i in range(x.shape[2])]
        some, (h, w) = z[:, :, taken[0] : taken[-1] + 1].contiguous(), z.shape[3:]
        gains, shifts = (layer.convolution(some)[:, :, :, :, None, :, None] for layer in (self.conv_y, self.conv_b))
        grows, frames = torch.is_grad_enabled(), []
        for frame, latent in zip(y.split(1, 2), taken, strict=True):
            at = slice(latent - taken[0], latent - taken[0] + 1)
            tiled, gain, shift = frame.unflatten(4, (w, -1)).unflatten(3, (h, -1)), gains[:, :, at], shifts[:, :, at]
            frames.append(torch.addcmul(shift, tiled, gain) if grows else tiled.mul_(gain).add_(shift))
        if grows:
            y = torch.cat(frames, 2).flatten(5, 6).flatten(3, 4)
        return F.silu(y, inplace=not grows) if self.act else y

    def condition(self) -> Condition:
        """Return the two convolutions as the fused operators read them."""
        layers = self.conv_y.convolution, self.conv_b.convolution
        weight = torch.cat([layer.weight.float().flatten(1) for layer in layers]).t().contiguous()
        return Condition(weight, torch.cat([layer.bias.float() for layer in layers]), self.rate)


@dataclass(frozen=True)
class Spatial:
    """Choice of SpatialNormAct. latent: channels of the latent. rate: frames per latent."""

    groups: int
    latent: int
    rate: int
    late = whole = False

    def module(self, channels: int, act: bool = True, axes: int = 3) -> SpatialNormAct:
        return SpatialNormAct(channels, self.groups, self.latent, self.rate, act)


@dataclass(frozen=True)
class LatentConv(conv.Conv):
    """The first convolution of a decoder whose norms see the latents: it takes those of a whole clip at once."""

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        state.constants[LATENTS] = x
        return super().plain(part, x, state)

    def run(self, packed: Any, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        run.latents = x
        return super().run(packed, run, x, sums, out, groups, first)
