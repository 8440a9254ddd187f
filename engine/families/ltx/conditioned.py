"""Steps whose norms are scaled and shifted by a timestep, which is the same for all frames and positions, and residual
blocks that add noise or norm their shortcut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import norm_act
from ...network.ops import ends, resnet
from ...network.ops.norm import Norm
from ...network.state import State, drawn
from ...network.tree import graft
from ...network.values import Style
from ...options import Options
from ...precision.forms import Operands

#: Size of a timestep's embedding: cosines, then sines.
WAVES = 256
#: Name of the parameter that the timestep is multiplied by.
MULTIPLIER = "timestep_scale_multiplier"
Part = Callable[[str], nn.Module]


def waves_of(timestep: Tensor | float, device: torch.device) -> Tensor:
    """Return cosines, then sines, of a timestep at falling rates, float32 [WAVES]."""
    rates = torch.exp(torch.arange(WAVES // 2, device=device) * (-math.log(10000.0) / (WAVES // 2)))
    return torch.cat(((timestep * rates).cos(), (timestep * rates).sin()))


class TimeEmbedding(nn.Module):
    """Embed a timestep as [channels] in float32, through two linear layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        graft(self, "timestep_embedder.linear_1", nn.Linear(WAVES, channels))
        graft(self, "timestep_embedder.linear_2", nn.Linear(channels, channels))

    def forward(self, timestep: Tensor) -> Tensor:
        """Return the embedding of a timestep, float32 []."""
        layers = self.timestep_embedder
        waves = waves_of(timestep, timestep.device)
        hidden = F.silu(F.linear(waves, layers.linear_1.weight.float(), layers.linear_1.bias.float()))
        return F.linear(hidden, layers.linear_2.weight.float(), layers.linear_2.bias.float())


def conditioned(table: nn.Parameter, embedding: TimeEmbedding, multiplier: Tensor, timestep: float) -> Tensor:
    """Return [rows, C] float32: shift and scale of each norm in turn; 1 is still to be added to each scale."""
    return table.float() + embedding(timestep * multiplier.float()).view(table.shape)


def _once(name: str, state: State | None, make: Callable[[], Tensor]) -> Tensor:
    """Return `make()`, which is called once per clip."""
    return make() if state is None else state.once(name, make)


def pairs(values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (scale, shift) of each norm."""
    for shift, scale in values.unflatten(0, (-1, 2)):
        yield 1.0 + scale, shift


def scaled(norm: norm_act.Norm, scale: Tensor, shift: Tensor) -> norm_act.Norm:
    """Return a norm without parameters with this scale and shift as its own."""
    return replace(norm, weight=scale.contiguous(), bias=shift.contiguous())


class Resnet(resnet.Resnet):
    """A residual block conditioned on a timestep. timestep: that of its table, if it has one. noisy: it adds two planes
    of noise, each the same in all frames, with a factor per channel. A shortcut to another width has a norm over
    channels."""

    def __init__(
        self, c_in: int, c_out: int, norm: Norm, names: resnet.Names, style: Style, timestep: float | None,
        noisy: bool,
    ) -> None:  # fmt: skip
        super().__init__(c_in, c_out, norm, names, style)
        self.timestep, self.noisy = timestep, noisy
        if timestep is not None:
            self.scale_shift_table = nn.Parameter(torch.zeros(4, c_in))
        for i in (1, 2) if noisy else ():
            self.register_parameter(f"per_channel_scale{i}", nn.Parameter(torch.zeros(c_in, 1, 1)))
        if c_in != c_out:
            graft(self, "norm3.norm", nn.LayerNorm(c_in, eps=1e-6))

    def forward(self, x: Tensor, state: State | None = None, values: Tensor | None = None) -> Tensor:
        """Execute the block; `values` is the result of `conditioned`."""
        first, second = ((), ()) if values is None else pairs(values)
        conv2, shortcut = self.part("conv2"), self.part("conv_shortcut")
        h = self._noised(self.part("conv1")(self.part("norm1")(x, state, *first), state), 1, state)
        h = self._noised(conv2(self.part("norm2")(h, state, *second), state), 2, state)
        if state is not None:
            x = state.aligned(f"{conv2.key} residual", x, h)
        if shortcut is not None:
            norm = self.norm3.norm
            x = F.layer_norm(x.movedim(1, -1), norm.normalized_shape, norm.weight, norm.bias, norm.eps).movedim(-1, 1)
            x = shortcut(x)
        return x + h if torch.is_grad_enabled() else h.add_(x)

    def _noised(self, h: Tensor, index: int, state: State | None) -> Tensor:
        if not self.noisy or state is None or state.seed is None:
            return h
        place = f"{self.part('conv1').key} noise {index}"
        plane = _once(place, state, lambda: drawn(state.seed, place, *h.shape[3:]).to(h))
        return h + plane * getattr(self, f"per_channel_scale{index}").to(h)[:, None]


@dataclass(frozen=True)
class Res(resnet.Res):
    """The residual step. embedding: the name of its timestep embedding, "" if it has none; owns: it is the first of the
    steps that share the embedding."""

    embedding: str = ""
    owns: bool = False
    timestep: float = 0.0
    noisy: bool = False

    def modules(self, style: Style) -> dict[str, nn.Module]:
        timestep = self.timestep if self.embedding else None
        block = Resnet(self.c_in, self.c_out, self.norm, self.names, style, timestep, self.noisy)
        return {self.name: block} | ({self.embedding: TimeEmbedding(4 * self.c_in)} if self.owns else {})

    def pack(self, part: Part, operands: Operands, options: Options) -> resnet.Packed:
        packed = super().pack(part, operands, options)
        if not self.embedding:
            return packed
        norms = (packed.norm1, packed.norm2)
        norm1, norm2 = (scaled(norm, *pair) for norm, pair in zip(norms, pairs(self.values(part)), strict=True))
        return replace(packed, norm1=norm1, norm2=norm2)

    def why_not_fused(self, style: Style) -> str | None:
        if self.noisy:
            return "it adds noise between its convolutions, which only plain torch does"
        if self.c_in != self.c_out:
            return "its shortcuts have norms of their own, which only plain torch does"
        return super().why_not_fused(style)

    def plain(self, part: Part, x: Tensor, state: State | None) -> Tensor:
        return part(self.name)(x, state, _once(self.name, state, lambda: self.values(part)) if self.embedding else None)

    def values(self, part: Part) -> Tensor:
        """Return shifts and scales as from `conditioned`."""
        block = part(self.name)
        return conditioned(block.scale_shift_table, part(self.embedding), part(MULTIPLIER), block.timestep)


@dataclass(frozen=True)
class Pixels(ends.Pixels):
    """The step to pixels, after a norm that the timestep scales. It owns the parameters that the whole component
    shares."""

    embedding: str = "last_time_embedder"
    table: str = "last_scale_shift_table"
    timestep: float = 0.0

    def modules(self, style: Style) -> dict[str, nn.Module]:
        norm = self.norm.module(self.c_in)
        norm.timestep = self.timestep
        return super().modules(style) | {
            self.norm_name: norm,
            self.embedding: TimeEmbedding(2 * self.c_in),
            self.table: nn.Parameter(torch.zeros(2, self.c_in)),
            MULTIPLIER: nn.Parameter(torch.tensor(1000.0)),
        }

    def pack(self, part: Part, operands: Operands, options: Options) -> ends.PackedEnd:
        packed = super().pack(part, operands, options)
        (pair,) = pairs(self.values(part))
        return replace(packed, norm=scaled(packed.norm, *pair))

    def normed(self, part: Part, x: Tensor, state: State | None) -> Tensor:
        ((scale, shift),) = pairs(_once(self.name, state, lambda: self.values(part)))
        return part(self.norm_name)(x, state, scale, shift)

    def values(self, part: Part) -> Tensor:
        """Return shifts and scales as from `conditioned`."""
        timestep = part(self.norm_name).timestep
        return conditioned(part(self.table), part(self.embedding), part(MULTIPLIER), timestep)
