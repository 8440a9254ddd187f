"""Downsampling by a 3x3x3 convolution whose pixels become channels, with a shortcut of averaged channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels.conv3d import Partials
from ...options import Options
from ...precision.forms import Operands
from ...runtime.run import Run
from ...runtime.weights import Conv
from ..packed import conv_of
from ..program import CAUSAL, Size, Style, Work
from ..state import State
from .conv import OneConv, conv_work, styled
from .means import mean
from .shortcut import Shortcut


def gathered(x: Tensor, z: int) -> Tensor:
    """Turn samples into channels: [B, C, z * T, 2h, 2w] -> [B, 4 * z * C, T, h, w]; channel ((frame * 2 + row) * 2 +
    column) * C + c."""
    b, c, t, h, w = x.shape
    x = x.view(b, c, t // z, z, h // 2, 2, w // 2, 2).permute(0, 3, 5, 7, 1, 2, 4, 6)
    return x.reshape(b, 4 * z * c, t // z, h // 2, w // 2)


class Downsample(OneConv):
    """Apply a 3x3x3 convolution, turn 2x2 pixels (x2 frames if `temporal`) into channels, and add the means over
    neighbouring channels of the input treated the same way.

    lead: a clip's first frame has no partner: its pixels make half of the channels, and are repeated for the other
    half.
    """

    def __init__(
        self, c_in: int, c_out: int, temporal: bool, lead: bool, conv: str, style: Style = CAUSAL
    ) -> None:  # fmt: skip
        z = 2 if temporal else 1
        super().__init__(conv, styled(c_in, c_out // (4 * z), style))
        self.z, self.lead, self.width = z, lead and temporal, c_out

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        lead = int(self.lead and self.convolution.starts(state) and x.shape[2] > 0)
        y = self.convolution(x, state)
        if state is not None:
            x = state.aligned(f"{self.convolution.key} shortcut", x, y)
        rest = gathered(y[:, :, lead:], self.z) + self._means(x[:, :, lead:], self.z)
        if not lead:
            return rest
        return torch.cat((gathered(y[:, :, :1], 1).repeat(1, 2, 1, 1, 1) + self._means(x[:, :, :1], 1), rest), 2)

    def _means(self, x: Tensor, z: int) -> Tensor:
        return mean(gathered(x, z).unflatten(1, (self.width, -1)), 2)


def _blocks(x: Tensor, z: int) -> Tensor:
    """Return the view [F, h, w, z, 2, 2, C] of x [z * F, 2h, 2w, C]."""
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).unflatten(0, (-1, z)).permute(0, 2, 4, 1, 3, 5, 6)


def _means(x: Tensor, z: int, out: Tensor) -> None:
    """Write the means of neighbouring channels of x, its pixels turned into channels, to out [F, h, w, K]."""
    each = 4 * z * x.shape[3] // out.shape[3]
    values, target = _blocks(x, z).unflatten(6, (-1, each)), out.unflatten(3, (z, 2, 2, -1))
    if each == 2:  # at full size: a pass as fast as a copy
        torch.lerp(values[..., 0], values[..., 1], 0.5, out=target)
    else:
        torch.mean(values, 7, out=target)


@dataclass(frozen=True)
class ShortcutDown(Shortcut):
    space = (1, 2)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Downsample(self.c_in, self.c_out, self.temporal, self.lead, self.conv, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv:
        return conv_of(part(self.name).convolution, operands, normed=False)

    def run(self, packed: Conv, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        lead = self.leads(first)
        with run.arena.scope():
            y = run.take(*x.shape[:3], packed.out_channels)
            run.conv(packed, x, y)
            if not run.dry:
                if lead:
                    both = out[:1].unflatten(3, (2, -1))
                    _means(x[:1], 1, out[:1])
                    both.add_(_blocks(y[:1], 1).flatten(3).unsqueeze(3))
                if out.shape[0] > lead:
                    z = self.time[1]
                    _means(x[lead:], z, out[lead:])
                    out[lead:].unflatten(3, (z, 2, 2, -1)).add_(_blocks(y[lead:], z))
        return out, None

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out // (4 * self.time[1]))
