"""Resampling by a 3x3x3 convolution and a pixel shuffle, with a shortcut that repeats the input's channels or takes
their means."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, Weight, pack_tiles, pack_weight
from ...kernels.duplicate import duplicate
from ...options import Options
from ...precision.forms import Balancer, Operands
from ...runtime.context import COPY, ExecutionContext
from ...runtime.weights import Conv
from ..packed import clip_kernel, conv_of, in_tiles, packed_conv
from ..program import Resampling
from ..state import State
from ..values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from .conv import Between, OneConv, conv_work, styled, taps_of


def mean(x: Tensor, dim: int) -> Tensor:
    """Return x.mean(dim), summed in one order: torch's order on a CPU depends on the number of values, and so on the
    chunk."""
    total = functools.reduce(torch.add, (part.float() for part in x.unbind(dim)))
    return (total / x.shape[dim]).to(x.dtype)


@dataclass(frozen=True)
class Shortcut(Resampling, Between):
    """lead: a clip's first frame is treated separately by the step's module. conv: the convolution's name within the
    step."""

    temporal: bool
    lead: bool = True
    conv: str = "conv"

    def leads(self, first: int) -> int:
        """Return 1 if the frame `first` is a clip's first one and is treated separately, else 0."""
        return int(self.lead and self.temporal and first == 0)

    def size(self, size: Size, starts: bool) -> Size:
        return super().size(size, starts and self.lead)

    def taps(self, style: Style) -> Taps:
        return taps_of(style)


def shuffled(x: Tensor, z: int) -> Tensor:
    """Turn channels into samples: [B, 4 * z * C, T, h, w] -> [B, C, z * T, 2h, 2w]; channel ((frame * 2 + row) * 2 +
    column) * C + c."""
    b, c, t, h, w = x.shape
    x = x.view(b, z, 2, 2, c // (4 * z), t, h, w).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return x.reshape(b, c // (4 * z), z * t, 2 * h, 2 * w)


class ShuffledUp(OneConv):
    """Apply a 3x3x3 convolution and pixel shuffle (x2 in height and width, and in time if `temporal`), and add the
    input's channels repeated and shuffled the same way.

    lead: a clip's first frame stays one: it is shuffled in space only, which gives twice as many channels, and the
    first half of them is kept. T frames become 2T - 1 in the first call and 2T in later ones.
    """

    def __init__(self, c_in: int, c_out: int, temporal: bool, lead: bool, conv: str, style: Style = CAUSAL) -> None:
        z = 2 if temporal else 1
        super().__init__(conv, styled(c_in, 4 * z * c_out, style))
        self.z, self.lead, self.repeats = z, lead and temporal, 4 * z * c_out // c_in

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        lead = int(self.lead and self.convolution.starts(state) and x.shape[2] > 0)
        y = self.convolution(x, state)
        if state is not None:
            x = state.aligned(f"{self.convolution.key} shortcut", x, y)
        rest = shuffled(y[:, :, lead:], self.z)
        rest += shuffled(x[:, :, lead:].repeat_interleave(self.repeats, 1), self.z)
        if not lead:
            return rest
        first = shuffled(y[:, :, :1], 1).chunk(2, 1)[0]
        return torch.cat((first + shuffled(x[:, :, :1].repeat_interleave(self.repeats // 2, 1), 1), rest), 2)


def _by_phase(rows: Tensor, z: int) -> Tensor:
    """Reorder channels ((frame * 2 + row) * 2 + column) * K + k to the order of a convolution's phases: ((row * 2 +
    column) * z + frame) * K + k."""
    return rows.unflatten(0, (z, 2, 2, -1)).movedim(0, 2).flatten(0, 3)


@dataclass(frozen=True)
class ShortcutUp(Shortcut):
    space = (2, 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: ShuffledUp(self.c_in, self.c_out, self.temporal, self.lead, self.conv, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv:
        conv, z = part(self.name).convolution, self.time[0]
        form = operands.form(conv.key, normed=False)
        # An overflowing sum of values that no norm bounds is detected and computed again.
        tiles = in_tiles(operands, form, self.c_in, self.c_out, clip_kernel(conv.weight).shape[2])

        def make(balancer: Balancer | None) -> tuple[Weight, Tensor]:
            kernel, phases = _by_phase(clip_kernel(conv.weight), z), (z, 2, 2)
            if tiles:
                return pack_tiles(kernel, form.dtype, phases), _by_phase(conv.bias, z).float()
            return pack_weight(kernel, form.dtype, phases, balance=balancer), _by_phase(conv.bias, z).float()

        return operands.once(conv.key, form, lambda: packed_conv(conv.key, form, make))

    def run(self, packed: Conv, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        lead = self.leads(first)
        if packed.weight.tiles or (self.lead and self.temporal):
            groups = 0  # sums by phase, or of the first frame, belong to other tiles: the norm computes its own
        if not run.dry:  # the shortcut, to which the convolution is added; a first frame is shuffled in space only
            duplicate(x[:lead], out[:lead], samples_first=True)
            duplicate(x[lead:], out[lead:], frames=self.time[0], samples_first=True)
        parts = []
        for i in run.inputs(packed, x, COPY, None, x.shape[1], Geometry()):
            target, frames = i.rows(out, 2), []
            if lead:
                self._first(packed, run, i.data, i.start, i.geometry, target[:1])
            if target.shape[0] > lead:
                start = (i.start + lead) % i.data.shape[0]
                frames.append(run.product(packed, i.data, target[lead:], geometry=i.geometry, residual=target[lead:],
                                          groups=groups, start=start))  # fmt: skip
            parts.append(run.joined(frames, 0))
        return out, run.walk.sums(out, groups, (2, 2)) if run.walk.open else run.joined(parts)

    def _first(
        self, packed: Conv, run: ExecutionContext, data: Tensor, start: int, geometry: Geometry, out: Tensor
    ) -> None:
        """Write a clip's first frame, shuffled in space only: phase by phase from the weight rows that make it."""
        weight, k = packed.weight, self.c_out
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            at = 4 * column + row  # of channel 4 * row + 2 * column in ((frame * 2 + row) * 2 + column)
            conv = replace(packed, weight=weight.phase(at), bias=packed.bias[at * k : at * k + k])
            target = out[:, row::2, column::2]
            run.product(conv, data, target, geometry=geometry, residual=target, start=start)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, 4 * self.time[0] * self.c_out)

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.{self.conv}", min(self.c_in, self.c_out)),)


def gathered(x: Tensor, z: int) -> Tensor:
    """Turn samples into channels: [B, C, z * T, 2h, 2w] -> [B, 4 * z * C, T, h, w]; channel ((frame * 2 + row) * 2 +
    column) * C + c."""
    b, c, t, h, w = x.shape
    x = x.view(b, c, t // z, z, h // 2, 2, w // 2, 2).permute(0, 3, 5, 7, 1, 2, 4, 6)
    return x.reshape(b, 4 * z * c, t // z, h // 2, w // 2)


class ShuffledDown(OneConv):
    """Apply a 3x3x3 convolution, turn 2x2 pixels (x2 frames if `temporal`) into channels, and add the means over
    neighbouring channels of the input treated the same way.

    lead: a clip's first frame has no partner: its pixels make half of the channels, and are repeated for the other
    half.
    """

    def __init__(self, c_in: int, c_out: int, temporal: bool, lead: bool, conv: str, style: Style = CAUSAL) -> None:
        z = 2 if temporal else 1
        super().__init__(conv, styled(c_in, c_out // (4 * z), style))
        self.z, self.lead, self.width = z, lead and temporal, c_out

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        lead = int(self.lead and self.convolution.starts(state) and x.shape[2] > 0)
        y = self.convolution(x, state)
        if state is not None:
            x = state.aligned(f"{self.convolution.key} shortcut", x, y)
        rest = gathered(y[:, :, lead:], self.z) + self._write_means(x[:, :, lead:], self.z)
        if not lead:
            return rest
        return torch.cat((gathered(y[:, :, :1], 1).repeat(1, 2, 1, 1, 1) + self._write_means(x[:, :, :1], 1), rest), 2)

    def _write_means(self, x: Tensor, z: int) -> Tensor:
        return mean(gathered(x, z).unflatten(1, (self.width, -1)), 2)


def _blocks(x: Tensor, z: int) -> Tensor:
    """Return the view [F, h, w, z, 2, 2, C] of x [z * F, 2h, 2w, C]."""
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).unflatten(0, (-1, z)).permute(0, 2, 4, 1, 3, 5, 6)


def _write_means(x: Tensor, z: int, out: Tensor) -> None:
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
        return {self.name: ShuffledDown(self.c_in, self.c_out, self.temporal, self.lead, self.conv, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv:
        return conv_of(part(self.name).convolution, operands, normed=False)

    def run(self, packed: Conv, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        lead = self.leads(first)
        with run.arena.scope():
            y = run.take(*x.shape[:3], packed.out_channels)
            run.conv(packed, x, y)
            if not run.dry:
                if lead:
                    both = out[:1].unflatten(3, (2, -1))
                    _write_means(x[:1], 1, out[:1])
                    both.add_(_blocks(y[:1], 1).flatten(3).unsqueeze(3))
                if out.shape[0] > lead:
                    z = self.time[1]
                    _write_means(x[lead:], z, out[lead:])
                    out[lead:].unflatten(3, (z, 2, 2, -1)).add_(_blocks(y[lead:], z))
        return out, None

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out // (4 * self.time[1]))
