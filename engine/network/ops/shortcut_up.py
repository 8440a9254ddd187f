"""Upsampling by a 3x3x3 convolution and a pixel shuffle, beside a shortcut of repeated channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..program import CAUSAL, Resampling, Size, Style, Taps, Work
from ..state import State
from ..tree import find, graft
from .conv import ClipConv, conv_work, styled, taps_of


def shuffled(x: Tensor, z: int) -> Tensor:
    """[B, 4 * z * C, T, h, w] -> [B, C, z * T, 2h, 2w]; channel ((frame * 2 + row) * 2 + column) * C + c."""
    b, c, t, h, w = x.shape
    x = x.view(b, z, 2, 2, c // (4 * z), t, h, w).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return x.reshape(b, c // (4 * z), z * t, 2 * h, 2 * w)


class Upsample(nn.Module):
    """3x3x3 convolution and pixel shuffle (x2 in height and width, and in time where `temporal`), added to the input's
    channels repeated and shuffled the same way.

    lead: a clip's first frame stays one: shuffled in space only, of whose then twice as many channels the first half is
    it. T frames become 2T - 1 in the first call and 2T in later ones.
    """

    def __init__(
        self, c_in: int, c_out: int, temporal: bool, lead: bool, conv: str, style: Style = CAUSAL
    ) -> None:  # fmt: skip
        super().__init__()
        self.z, self.lead = 2 if temporal else 1, lead and temporal
        self.repeats = 4 * self.z * c_out // c_in
        self._name = conv
        graft(self, conv, styled(c_in, 4 * self.z * c_out, style))

    @property
    def last(self) -> ClipConv:
        return find(self, self._name)  # type: ignore[return-value]

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        lead = int(self.lead and self.last.starts(state) and x.shape[2] > 0)
        y = self.last(x, state)
        if state is not None:
            x = state.aligned(f"{self.last.key} shortcut", x, y)
        rest = shuffled(y[:, :, lead:], self.z)
        rest += shuffled(x[:, :, lead:].repeat_interleave(self.repeats, 1), self.z)
        if not lead:
            return rest
        first = shuffled(y[:, :, :1], 1).chunk(2, 1)[0]
        return torch.cat((first + shuffled(x[:, :, :1].repeat_interleave(self.repeats // 2, 1), 1), rest), 2)


@dataclass(frozen=True)
class ShortcutUp(Resampling):
    """lead: of Upsample. conv: the convolution's name within the step."""

    name: str
    c_in: int
    c_out: int
    temporal: bool
    lead: bool = True
    conv: str = "conv"
    space = (2, 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Upsample(self.c_in, self.c_out, self.temporal, self.lead, self.conv, style)}

    def why_not_fused(self, style: Style) -> str | None:
        return "repeated channels are added by the plain walk only"

    def size(self, size: Size, starts: bool) -> Size:
        return super().size(size, starts and self.lead)

    def channels(self, channels: int) -> int:
        return self.c_out

    def taps(self, style: Style) -> Taps:
        return taps_of(style)

    def work(self, size: Size) -> Work:
        return conv_work(size, 4 * self.time[0] * self.c_out)

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.{self.conv}", min(self.c_in, self.c_out)),)
