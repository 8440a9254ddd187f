"""Steps inside one shortcut without parameters, which repeats samples to go up and takes their means to go down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.conv3d import Weight, pack_weight
from ...kernels.duplicate import duplicate
from ...network.chain import Link, given, pack_chain, through
from ...network.ops.shortcut import mean
from ...network.program import Step, work_of
from ...network.state import State
from ...network.values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import ExecutionContext
from ...runtime.weights import Conv


def duplicate_up(x: Tensor, channels: int, temporal: bool, starts: bool) -> Tensor:
    """Repeat every value of [B, C, T, H, W] into `channels` and its 2x2 (x2) samples."""
    b, c, t, h, w = x.shape
    z = 2 if temporal else 1
    x = x.repeat_interleave(channels * 4 * z // c, 1).view(b, channels, z, 2, 2, t, h, w)
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, channels, t * z, 2 * h, 2 * w)
    return x[:, :, 1:] if starts and temporal else x


def average_down(x: Tensor, channels: int, temporal: bool, down: bool) -> Tensor:
    """Return the means of [B, C, T, H, W] over the samples and neighbouring channels that become one.

    A clip's first frame has a zero frame for its partner.
    """
    z, s = (2 if temporal else 1), (2 if down else 1)
    x = F.pad(x, (0, 0, 0, 0, x.shape[2] % z, 0))
    b, c, t, h, w = x.shape
    x = x.view(b, c, t // z, z, h // s, s, w // s, s).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return mean(x.reshape(b, channels, c * z * s * s // channels, t // z, h // s, w // s), 2)


@dataclass(frozen=True)
class Average:
    """`average_down` as strided convolutions. `lead` is for a clip's first frame: it leaves out the earlier frame,
    which is zero there; None where pictures have no other frames."""

    means: Conv
    lead: Weight | None


@dataclass(frozen=True)
class Packed:
    links: tuple[Link, ...]
    average: Average | None


@dataclass(frozen=True)
class Around(Step):
    """y = steps(x) + shortcut(x); the shortcut repeats where the last step upsamples and takes means elsewhere.

    paired: the shortcut of a picture is that of a clip's first frame where frames are doubled or halved, although the
    steps leave their number as it is: of two frames only the last one is kept, or not zero.
    """

    name: str
    steps: tuple[Step, ...]
    paired: bool = False

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return self.steps[-1].time

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return self.steps[-1].space

    @property
    def resamples(self) -> bool:
        return self.space != (1, 1)

    @property
    def up(self) -> bool:
        return self.space[0] > self.space[1]

    @property
    def in_place(self) -> bool:  # type: ignore[override]
        return all(s.in_place for s in self.steps)

    @property
    def below(self) -> bool:  # type: ignore[override]
        return self.resamples

    def inner(self) -> tuple[Step, ...]:
        return self.steps

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        temporal, last = self.time != (1, 1), self.steps[-1].name
        starts = temporal and part(last).time_conv.starts(state)
        y = x
        for step in self.steps:
            y = step.plain(part, y, state)
        batch = x.shape[0]
        if self.paired:  # every picture is a clip
            x, temporal, starts = x.transpose(1, 2).flatten(0, 1).unsqueeze(2), True, True
        if self.up:
            around = duplicate_up(x, y.shape[1], temporal, starts)
        else:
            around = average_down(x, y.shape[1], temporal, self.resamples)
        return y + (around.squeeze(2).unflatten(0, (batch, -1)).transpose(1, 2) if self.paired else around)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        links = pack_chain(self.steps, part, operands, options)
        return Packed(links, None if self.up else self._average(part, operands.dtype))

    def _average(self, part: Callable[[str], nn.Module], dtype: torch.dtype) -> Average:
        z, s = 2 if self.paired else self.time[1], self.space[1]
        c_in, width = self.steps[0].c_in, self.channels(0)
        device = next(part(self.steps[0].name).parameters()).device
        samples = torch.arange(c_in * z * s * s, device=device) // (c_in * z * s * s // width)
        kernel = F.one_hot(samples, width).t().reshape(width, c_in, z, s, s) / (c_in * z * s * s // width)
        lead = pack_weight(kernel[:, :, z - 1 :], dtype)
        if self.paired:
            return Average(Conv(f"{self.name} average", lead, None, stride=(1, s, s)), None)
        means = Conv(f"{self.name} average", pack_weight(kernel, dtype), None, stride=(z, s, s))
        return Average(means, lead)

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        starts, size = first == 0, Size(*x.shape)
        if self.resamples:
            self._shortcut(packed, run, x, out, starts)
            *before, last = packed.links
            with run.arena.scope():
                y, _ = through(run, before, size, given(x))
                last.step.onto(last.packed, run, y, out, first, add=True)
            return out, None
        if not self.in_place and out is None:
            out = run.take(*x.shape[:3], self.channels(0))
        with run.arena.scope():
            around = run.take(*x.shape[:3], self.channels(0))
            self._shortcut(packed, run, x, around, starts)
            y, _ = through(run, packed.links, size, given(x), out)
            if not run.dry:
                y.add_(around)
        return y, None

    def _shortcut(self, packed: Packed, run: ExecutionContext, x: Tensor, out: Tensor, starts: bool) -> None:
        """Write the shortcut's result for x to `out`, to which the steps' result is added later."""
        if run.dry:
            return
        if packed.average is None:
            if self.paired:
                for picture, made in zip(x.split(1), out.split(1), strict=True):
                    duplicate(picture, made, frames=2, drop=1)
                return
            frames = self.time[0]
            duplicate(x, out, frames=frames, drop=int(starts and frames > 1))
            return
        means, lead = packed.average.means, int(starts and self.time != (1, 1))
        if lead:
            run.pointwise(means, x[:1], out[:1], weight=packed.average.lead)
        if out.shape[0] > lead:
            run.pointwise(means, x[lead:], out[lead:])

    def why_not_fused(self, style: Style) -> str | None:
        norms = any(s.groups for s in self.steps)
        return "sums of groups do not pass a shortcut around several steps" if norms else None

    def taps(self, style: Style) -> Taps:
        return Taps(*map(sum, zip(*(s.taps(style) for s in self.steps), strict=True)))

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return work_of(self.steps, size, style)

