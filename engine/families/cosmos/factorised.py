"""3x3x3 convolutions factorised into one of every frame and one in time; resampling by means and repetition with such
convolutions; and blocks of pixels as Haar wavelets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...network.ops import ends, resnet
from ...network.ops.conv import Between, ClipConv, conv_work
from ...network.program import Resampling, Step
from ...network.state import State, grouped
from ...network.tree import graft
from ...network.values import CAUSAL, Size, Style, Taps, Work

SPACE, TIME = (1, 3, 3), (3, 1, 1)
_WHY = "its convolutions are factorised, which only plain torch does"


class Pair(nn.Module):
    """A convolution in space, then one in time."""

    key = ""

    def __init__(self, c_in: int, c_out: int, style: Style) -> None:
        super().__init__()
        graft(self, "0.conv3d", ClipConv(c_in, c_out, SPACE, head=style.head))
        graft(self, "1.conv3d", ClipConv(c_out, c_out, TIME, head=style.head))

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        for branch in self.children():
            x = branch.conv3d(x, state)
        return x


def pair_work(size: Size, c_out: int) -> Work:
    return conv_work(size, c_out, 9) + conv_work(size._replace(channels=c_out), c_out, 3)


@dataclass(frozen=True)
class Conv(Between):
    stream: ClassVar[bool] = False
    plain_only = _WHY

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Pair(self.c_in, self.c_out, style)}

    def taps(self, style: Style) -> Taps:
        return Taps(2)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return pair_work(size, self.c_out)


@dataclass(frozen=True)
class Res(resnet.Res):
    plain_only = _WHY

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: resnet.Resnet(self.c_in, self.c_out, self.norm, self.names, style, Pair)}

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        total = pair_work(size, self.c_out) + pair_work(size._replace(channels=self.c_out), self.c_out)
        return total if self.in_place else total + conv_work(size, self.c_out, taps=1)


class Upsampler(nn.Module):
    """Repeat all frames but the clip's first, and add a convolution of them in time; the same for pixels; then
    1x1x1."""

    key = ""

    def __init__(self, channels: int, style: Style) -> None:
        super().__init__()
        graft(self, "conv1.conv3d", ClipConv(channels, channels, TIME, head=style.head))
        graft(self, "conv2.conv3d", ClipConv(channels, channels, SPACE))
        graft(self, "conv3.conv3d", ClipConv(channels, channels, (1, 1, 1)))

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        starts = state is None or state.count(self.key, x) == 0
        x = x.repeat_interleave(2, 2)[:, :, int(starts) :]
        x = self.conv1.conv3d(x, state) + x
        x = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
        x = self.conv2.conv3d(x) + x
        return self.conv3.conv3d(x)


class Downsampler(nn.Module):
    """Add means of pixels and a strided convolution; the same for frames, with the clip's first frame twice; then
    1x1x1."""

    key = ""

    def __init__(self, channels: int, style: Style) -> None:
        super().__init__()
        graft(self, "conv1.conv3d", ClipConv(channels, channels, SPACE, (1, 2, 2), padding=0))
        graft(self, "conv2.conv3d", ClipConv(channels, channels, TIME, (2, 1, 1), head=style.head))
        graft(self, "conv3.conv3d", ClipConv(channels, channels, (1, 1, 1)))

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1))
        x = self.conv1.conv3d(x) + F.avg_pool3d(x, (1, 2, 2))
        pairs = grouped(x, state, self.key, 2)
        y = self.conv2.conv3d(x, state)
        if y.shape[2]:
            y = y + F.avg_pool3d(pairs, (2, 1, 1))
        return self.conv3.conv3d(y)


@dataclass(frozen=True)
class _Resample(Resampling):
    name: str
    width: int
    temporal = True
    plain_only = _WHY

    def taps(self, style: Style) -> Taps:
        return Taps(2)


@dataclass(frozen=True)
class MeanUp(_Resample):
    space = (2, 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Upsampler(self.width, style)}

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        out, c = self.size(size, True), self.width
        return conv_work(out._replace(height=size.height, width=size.width), c, 3) + conv_work(out, c, 10)


@dataclass(frozen=True)
class MeanDown(_Resample):
    space = (1, 2)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Downsampler(self.width, style)}

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        out, c = self.size(size, True), self.width
        small = size._replace(height=out.height, width=out.width)
        return conv_work(size, c, 9, small) + conv_work(small, c, 4, out)


@dataclass(frozen=True)
class Moments(ends.Moments):
    plain_only = _WHY

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.norm_name: self.norm.module(self.c_in), self.name: Pair(self.c_in, self.c_out, style)}

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return pair_work(size, self.c_out)


class Wavelets(nn.Module):
    """A parameter that is constant; it identifies the files."""

    def __init__(self) -> None:
        super().__init__()
        self.wavelets = nn.Parameter(torch.full((2,), 0.5**0.5))


def to_wavelets(x: Tensor) -> Tensor:
    """Return [B, 8 * C, T / 2, H / 2, W / 2] for [B, C, T, H, W]: for each block of 2x2x2 the mean, and the means of
    differences along (frames, rows, columns), channel ((frame * 2 + row) * 2 + column) * C + c."""
    for axis in (4, 3, 2):
        size = x.shape[axis] // 2
        a, b = x.unflatten(axis, (size, 2)).unbind(axis + 1)
        x = torch.cat((a + b, a - b), 1) * 0.5
    return x


def from_wavelets(x: Tensor) -> Tensor:
    """Invert `to_wavelets`."""
    for axis in (2, 3, 4):
        a, b = x.chunk(2, 1)
        x = torch.stack((a + b, a - b), axis + 1).flatten(axis, axis + 1)
    return x


@dataclass(frozen=True)
class WaveletPatches(Step):
    """Turn blocks of `patch` frames, rows and columns into channels; the clip's first frame fills a block alone. Rows
    and columns beyond a multiple of `block` pixels are cut off."""

    name: str
    block: int
    patch: int
    stream: ClassVar[bool] = False
    plain_only = _WHY

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return 1, self.patch

    def taps(self, style: Style) -> Taps:
        return Taps(self.patch - 1)

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return 1, self.patch

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Wavelets()}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        n, (h, w) = self.patch, (n // self.block * self.block for n in x.shape[3:])
        x = grouped(x[..., :h, :w], state, self.name, n)
        for _ in range(int(math.log2(n))):
            x = to_wavelets(x)
        return x

    def size(self, size: Size, starts: bool) -> Size:
        made = super().size(size, starts)
        h, w = (n // self.block * self.block // self.patch for n in size[1:3])
        return made._replace(height=h, width=w)

    def channels(self, channels: int) -> int:
        return self.patch**3 * channels


@dataclass(frozen=True)
class WaveletPixels(ends._End):
    """The step to pixels. patch: frames, rows and columns that its channels hold; a clip's first block gives its last
    frame."""

    norm_name: str
    name: str
    c_in: int
    norm: ends.Norm
    patch: int
    wavelets: str
    plain_only = _WHY

    @property
    def c_out(self) -> int:
        return 3 * self.patch**3

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return self.patch, 1

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return self.patch, 1

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {
            self.norm_name: self.norm.module(self.c_in),
            self.name: Pair(self.c_in, self.c_out, style),
            self.wavelets: Wavelets(),
        }

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        x = super().plain(part, x, state)
        starts = state is None or state.count(self.name, x) == 0
        for _ in range(int(math.log2(self.patch))):
            x = from_wavelets(x)
        return x[:, :, self.patch - 1 :] if starts else x

    def channels(self, channels: int) -> int:
        return 3

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return pair_work(size, self.c_out)
