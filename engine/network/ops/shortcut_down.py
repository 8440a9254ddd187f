"""Downsampling by a 3x3x3 convolution whose pixels become channels, beside a shortcut of averaged channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..program import CAUSAL, Resampling, Size, Style, Taps, Work
from ..state import State
from ..tree import find, graft
from .conv import ClipConv, conv_work, styled, taps_of


def gathered(x: Tensor, z: int) -> Tensor:
    """[B, C, z * T, 2h, 2w] -> [B, 4 * z * C, T, h, w]; channel ((frame * 2 + row) * 2 + column) * C + c."""
    b, c, t, h, w = x.shape
    x = x.view(b, c, t // z, z, h // 2, 2, w // 2, 2).permute(0, 3, 5, 7, 1, 2, 4, 6)
    return x.reshape(b, 4 * z * c, t // z, h // 2, w // 2)


class Downsample(nn.Module):
    """3x3x3 convolution, then 2x2 pixels (x2 frames where `temporal`) become channels, added to the means over
    neighbouring channels of what the input's pixels become.

    lead: a clip's first frame has no partner: its pixels make half of the channels, and are the other half again.
    """

    def __init__(
        self, c_in: int, c_out: int, temporal: bool, lead: bool, conv: str, style: Style = CAUSAL
    ) -> None:  # fmt: skip
        super().__init__()
        self.z, self.lead, self.width = 2 if temporal else 1, lead and temporal, c_out
        self._name = conv
        graft(self, conv, styled(c_in, c_out // (4 * self.z), style))

    @property
    def first(self) -> ClipConv:
        return find(self, self._name)  # type: ignore[return-value]

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        lead = int(self.lead and self.first.starts(state) and x.shape[2] > 0)
        y = self.first(x, state)
        if state is not None:
            x = state.aligned(f"{self.first.key} shortcut", x, y)
        rest = gathered(y[:, :, lead:], self.z) + self._means(x[:, :, lead:], self.z)
        if not lead:
            return rest
        return torch.cat((gathered(y[:, :, :1], 1).repeat(1, 2, 1, 1, 1) + self._means(x[:, :, :1], 1), rest), 2)

    def _means(self, x: Tensor, z: int) -> Tensor:
        return gathered(x, z).unflatten(1, (self.width, -1)).mean(2)


@dataclass(frozen=True)
class ShortcutDown(Resampling):
    """lead: of Downsample. conv: the convolution's name within the step."""

    name: str
    c_in: int
    c_out: int
    temporal: bool
    lead: bool = True
    conv: str = "conv"
    space = (1, 2)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Downsample(self.c_in, self.c_out, self.temporal, self.lead, self.conv, style)}

    def why_not_fused(self, style: Style) -> str | None:
        return "averaged channels are added by the plain walk only"

    def size(self, size: Size, starts: bool) -> Size:
        return super().size(size, starts and self.lead)

    def channels(self, channels: int) -> int:
        return self.c_out

    def taps(self, style: Style) -> Taps:
        return taps_of(style)

    def work(self, size: Size) -> Work:
        return conv_work(size, self.c_out // (4 * self.time[1]))

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.{self.conv}", min(self.c_in, self.c_out // (4 * self.time[1]))),)
