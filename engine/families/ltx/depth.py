"""Resampling by a layer whose channels become samples, or samples channels, with or without a shortcut of the same
samples; and by a strided convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, pack_weight
from ...network.ops.conv import Between, ClipConv, Matrix, OneConv, conv_work, styled, taps_of
from ...network.ops.shortcut import mean
from ...network.state import State, grouped
from ...network.values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import COPY, ExecutionContext
from ...runtime.weights import Conv

_PLAIN = Geometry()
#: Samples per position along frames, rows and columns.
Stride = tuple[int, int, int]


def to_samples(x: Tensor, stride: Stride) -> Tensor:
    """Turn channels into samples: [B, C * samples, T, H, W] -> [B, C, T', H', W'], with channels in the order ((c *
    frames + frame) * rows + row) * columns + column."""
    b, c, t, h, w = x.shape
    pt, py, px = stride
    c //= math.prod(stride)
    x = x.view(b, c, pt, py, px, t, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(b, c, t * pt, h * py, w * px)


def to_channels(x: Tensor, stride: Stride) -> Tensor:
    """Invert `to_samples`."""
    b, c, t, h, w = x.shape
    pt, py, px = stride
    x = x.view(b, c, t // pt, pt, h // py, py, w // px, px).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(b, c * math.prod(stride), t // pt, h // py, w // px)


class Up(OneConv):
    """Upsampling module. A clip's first position gives only the last of its frames."""

    def __init__(self, c_in: int, c_out: int, stride: Stride, shortcut: bool, style: Style) -> None:
        super().__init__("conv.conv", styled(c_in, c_out * math.prod(stride), style))
        self.stride, self.shortcut = stride, shortcut

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        conv = self.convolution
        y = conv(x, state)
        if self.shortcut and state is not None:
            x = state.aligned(f"{conv.key} residual", x, y)
        starts = state is None or state.count(f"{conv.key} samples", y) == 0
        y = to_samples(y, self.stride)
        if self.shortcut:
            x = to_samples(x, self.stride)
            y = y.add_(x.repeat(1, y.shape[1] // x.shape[1], 1, 1, 1)) if x.shape[2] else y
        return y[:, :, self.stride[0] - 1 :] if starts else y


class Down(OneConv):
    """Downsampling module. A clip's first frame is repeated to fill a group of frames that become one."""

    def __init__(self, c_in: int, c_out: int, stride: Stride, style: Style) -> None:
        super().__init__("conv.conv", styled(c_in, c_out // math.prod(stride), style))
        self.stride, self.c_out = stride, c_out

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        conv, frames = self.convolution, self.stride[0]
        y = conv(x, state)
        # Before a clip both the samples and their convolution are copies of those of its first frame.
        both = grouped(torch.cat((x, y), 1), state, f"{conv.key} samples", frames)
        rows, columns = (n // s for n, s in zip(both.shape[3:], self.stride[1:], strict=True))
        both = both[..., : rows * self.stride[1], : columns * self.stride[2]]
        x, y = (to_channels(part.contiguous(), self.stride) for part in both.split((x.shape[1], y.shape[1]), 1))
        return y + mean(x.unflatten(1, (self.c_out, x.shape[1] // self.c_out)), 2)


@dataclass(frozen=True)
class _Depth(Between):
    stride: Stride
    up: ClassVar[bool] = False

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return (self.stride[0], 1) if self.up else (1, self.stride[0])

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return (self.stride[1], 1) if self.up else (1, self.stride[1])


@dataclass(frozen=True)
class Packed:
    """Packed weights for all frames of a position (`all`), and for the last one only (`last`), for a clip's first
    position."""

    all: Conv
    last: Conv


@dataclass(frozen=True)
class ToSamples(_Depth):
    """A step whose layer's channels become samples, in the order of `to_samples`."""

    up = True

    def packed(self, layer: nn.Module, dtype: torch.dtype) -> Packed:
        """Pack the layer with channels in the order in which the convolution's store makes samples of them."""
        frames, rows, columns = self.stride
        weight = layer.weight.float().view(self.c_out, *self.stride, self.c_in, *(layer.weight.shape[2:] or (1, 1, 1)))
        bias = layer.bias.float().view(self.c_out, *self.stride)

        def of(first: int) -> Conv:
            order = weight[:, first:].permute(2, 3, 1, 0, 4, 5, 6, 7).flatten(0, 3)
            made = pack_weight(order, dtype, (frames - first, rows, columns))
            return Conv(layer.key, made, bias[:, first:].permute(2, 3, 1, 0).reshape(-1).contiguous())

        return Packed(of(0), of(frames - 1))


@dataclass(frozen=True)
class DepthUp(ToSamples):
    """Upsampling step. shortcut: the repeated samples of the input are added to the convolution's."""

    shortcut: bool = False
    looks_ahead = True

    def taps(self, style: Style) -> Taps:
        return taps_of(style)

    def why_not_fused(self, style: Style) -> str | None:
        if self.stride[1:] == (1, 1) and self.c_in == self.c_out:
            # Convolutions of one shape share a ring, and get as many frames each.
            return "its frames double where their size and channels stay, which only plain torch does"
        return None

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Up(self.c_in, self.c_out, self.stride, self.shortcut, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        return self.packed(part(self.name).convolution, operands.dtype)

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        frames, rows, _ = self.stride
        made, _ = run.foresee(self.ahead(packed), x.shape[0], run.drains)
        lead = int(first == 0 and made > 0 and frames > 1)
        if self.shortcut:
            self._around(packed, run, x, out, made, lead)
        for i in run.inputs(packed.all, x, COPY, None, x.shape[1], _PLAIN):
            target = i.rows(out, rows)
            for conv, part, later in ((packed.last, target[:lead], 0), (packed.all, target[lead:], lead)):
                if part.shape[0]:
                    around = part if self.shortcut else None
                    start = (i.start + later) % i.data.shape[0]
                    run.product(conv, i.data, part, geometry=i.geometry, residual=around, start=start)
        return out, None

    def _around(self, packed: Packed, run: ExecutionContext, x: Tensor, out: Tensor, made: int, lead: int) -> None:
        """Write the samples of the stream's next frames to the place to which the convolution's samples are added."""
        parts = [(0, x)]
        if run.after:
            delay = run.delay(packed.all.key, 1, x)
            with run.arena.scope():
                scratch = run.arena.take(delay.whole, x.dtype)
                if run.dry:
                    delay.waiting += 0 if run.walk.open else x.shape[0] - made
                    return
                parts = delay.parts(x, made)
                for at, part in parts:
                    self._store(part, out, at, lead)
                delay.skip(x, made, scratch)
        elif not run.dry:
            self._store(x, out, 0, lead)

    def _store(self, x: Tensor, out: Tensor, at: int, lead: int) -> None:
        """Write the samples of x [D, H, W, C], whose first frame is number `at` of the frames that become `out`."""
        (frames, rows, columns), samples = self.stride, math.prod(self.stride)
        drop = (frames - 1) * lead
        for p in range(samples):
            frame, row, column = p // (rows * columns), p // columns % rows, p % columns
            first = at * frames + frame - drop
            skip = int(first < 0)
            first += skip * frames
            count = x.shape[0] - skip
            if count > 0:
                target = out[first :: frames, row::rows, column::columns][:count]
                source = x[skip:, ..., p::samples]
                target.unflatten(3, (-1, source.shape[3])).copy_(source[..., None, :])

    def ahead(self, packed: Packed) -> tuple[str, ...]:
        return (packed.all.key,)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out * math.prod(self.stride))


@dataclass(frozen=True)
class DepthDown(_Depth):
    """Downsampling step: the means of the input's samples are added to the convolution's result."""

    plain_only = "its samples become channels, which only plain torch does"

    def taps(self, style: Style) -> Taps:
        return Taps(2 + self.stride[0] - 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Down(self.c_in, self.c_out, self.stride, style)}

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out // math.prod(self.stride))


@dataclass(frozen=True)
class StrideDown(DepthDown):
    """One strided convolution: 3x3x3 with a border all around, or (`blocks`) on blocks that do not overlap."""

    blocks: bool = False
    plain_only = "its strided convolutions have a border all around or none, which only plain torch does"

    def modules(self, style: Style) -> dict[str, nn.Module]:
        kernel, padding = (self.stride, 0) if self.blocks else ((3, 3, 3), 1)
        conv = ClipConv(self.c_in, self.c_out, kernel, self.stride, padding, style.head, style.border)
        return {self.name: conv}

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        taps = math.prod(self.stride) if self.blocks else 27
        return conv_work(size, self.c_out, taps, self.size(size, True))


@dataclass(frozen=True)
class LinearUp(ToSamples):
    """Upsampling step. A clip's first position gives only the last of its frames."""

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Matrix(self.c_in, self.c_out * math.prod(self.stride))}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        starts = state is None or state.count(self.name, x) == 0
        y = to_samples(part(self.name)(x), self.stride)
        return y[:, :, self.stride[0] - 1 :] if starts else y

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        return self.packed(part(self.name), operands.dtype)

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        lead = int(first == 0)
        if lead:
            run.pointwise(packed.last, x[:1], out[:1])
        if x.shape[0] > lead:
            run.pointwise(packed.all, x[lead:], out[lead:])
        return out, None

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out * math.prod(self.stride), 1)
