"""Steps of tiny autoencoders of video: blocks that see a frame and the one before it, and frame rates that change by
1x1 convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...network.ops.conv import FlatConv, conv_work
from ...network.program import Step
from ...network.state import State
from ...network.values import CAUSAL, Size, Style, Taps, Work
from ..tae.rectified import WHY, leaking, rectified

#: Side of the convolution of single channels in a wide block, and the channels between its products, for each of its
#: width.
SIDE, INNER = 7, 4


def _with_past(x: Tensor, state: State | None, key: str, period: int) -> Tensor:
    """Return x [B, C, T, H, W] and the frame before each one of it as [B, 2C, T, H, W]: zeros before a clip, and before
    every frame whose number is a multiple of `period`, if that is not 0."""
    first, held = (0, None) if state is None else (state.count(key, x), state.histories.get(key))
    if not x.shape[2]:
        return x.repeat(1, 2, 1, 1, 1)
    frames = x.split(1, 2)
    past = [torch.zeros_like(frames[0]) if held is None else held, *frames[:-1]]
    for i in range(len(past)) if period else ():
        if (first + i) % period == 0:
            past[i] = torch.zeros_like(frames[0])
    both = torch.cat((x, torch.cat(past, 2) if len(past) > 1 else past[0]), 1)
    if state is not None:
        state.keep(key, x[:, :, -1:])
    return both


class _Remembering(Step):
    """A block that sees the frame before. period: as in `_with_past`."""

    name: str
    width: int
    period: int
    plain_only = WHY

    @property
    def beat(self) -> tuple[int, int]:  # type: ignore[override]
        return (0, self.period) if self.period else (1, 1)

    def taps(self, style: Style) -> Taps:
        return Taps(1)

    def _both(self, x: Tensor, state: State | None) -> Tensor:
        return _with_past(x, state, f"{self.name} past", self.period)


@dataclass(frozen=True)
class Remember(_Remembering):
    """y = relu(c(relu(b(relu(a([x, x before]))))) + x) with 3x3 convolutions a, b, c. leak: as in `rectified`."""

    name: str
    width: int
    leak: str = ""
    period: int = 0

    def modules(self, style: Style) -> dict[str, nn.Module]:
        w = self.width
        convs = {f"{self.name}.conv.{i}": FlatConv(c, w, 3, padding=1) for i, c in ((0, 2 * w), (2, w), (4, w))}
        return {**convs, **leaking(self.leak)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        y = part(f"{self.name}.conv.0")(self._both(x, state))
        for i in (2, 4):
            y = part(f"{self.name}.conv.{i}")(rectified(y, part, self.leak))
        return rectified(y + x, part, self.leak)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.width, (2 + 1 + 1) * 9)


class Apart(nn.Conv2d):
    """A convolution of every channel of every frame [B, C, T, H, W] by itself, without a bias."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__(channels, channels, side, padding=side // 2, groups=channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (x.shape[0], -1)).transpose(1, 2)


@dataclass(frozen=True)
class WideRemember(_Remembering):
    """y = c(relu(b(a([x, x before])))) + x: a 7x7 convolution of single channels and two products of positions, the
    first one with a bias."""

    name: str
    width: int
    period: int = 0

    def modules(self, style: Style) -> dict[str, nn.Module]:
        both, inner = 2 * self.width, INNER * self.width
        return {
            f"{self.name}.conv.0": Apart(both, SIDE),
            f"{self.name}.conv.1": FlatConv(both, inner, 1),
            f"{self.name}.conv.3": FlatConv(inner, self.width, 1, bias=False),
        }

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        y = part(f"{self.name}.conv.1")(part(f"{self.name}.conv.0")(self._both(x, state)))
        return part(f"{self.name}.conv.3")(F.relu(y)) + x

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        deep = conv_work(size._replace(channels=1), 2 * self.width, SIDE**2)
        return deep + conv_work(size, INNER * self.width, 3)


@dataclass(frozen=True)
class Grow(Step):
    """Make `count` frames of each by a 1x1 convolution.

    drop: so many of the first frames that it makes in a clip, and if `period` is not 0 in every so many, are left
    out: later steps need none of them."""

    name: str
    width: int
    count: int
    drop: int = 0
    period: int = 0
    plain_only = WHY

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return self.count, 1

    @property
    def beat(self) -> tuple[int, int]:  # type: ignore[override]
        return (0, self.period // self.count) if self.period else (-(-self.drop // self.count) or 1, 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {f"{self.name}.conv": FlatConv(self.width, self.count * self.width, 1, bias=False)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        first = 0 if state is None else self.count * state.count(f"{self.name} frames", x)
        y = part(f"{self.name}.conv")(x).unflatten(1, (self.count, self.width)).movedim(1, 3).flatten(2, 3)
        if not self.drop:
            return y
        at = range(first, first + y.shape[2])
        kept = [i for i, n in enumerate(at) if (n % self.period if self.period else n) >= self.drop]
        if len(kept) in (0, y.shape[2]):
            return y[:, :, : len(kept)]
        return torch.cat([y[:, :, i : i + 1] for i in kept], 2)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.count * self.width, 1)


@dataclass(frozen=True)
class Pool(Step):
    """Make one frame of every `count` by a 1x1 convolution."""

    name: str
    width: int
    count: int
    plain_only = WHY

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return 1, self.count

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {f"{self.name}.conv": FlatConv(self.count * self.width, self.width, 1, bias=False)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        key = f"{self.name} frames"
        if state is not None and key in state.histories:
            x = torch.cat((state.histories[key].to(x), x), 2)
        ready = x.shape[2] // self.count * self.count
        if state is not None and self.count > 1:
            state.keep(key, x[:, :, ready:])
        if not ready:
            return x.new_empty(x.shape[0], self.width, 0, *x.shape[3:])
        x = x[:, :, :ready].unflatten(2, (-1, self.count)).movedim(3, 1).flatten(1, 2)
        return part(f"{self.name}.conv")(x)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.width, 1)


@dataclass(frozen=True)
class Led(Step):
    """Put `count` black frames, -1, before the first of every `period` frames."""

    name: str
    count: int
    period: int
    plain_only = WHY

    @property
    def beat(self) -> tuple[int, int]:  # type: ignore[override]
        return 0, self.period

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        first = 0 if state is None else state.count(self.name, x)
        starts = [i for i in range(x.shape[2]) if (first + i) % self.period == 0]
        if not starts:
            return x
        black = torch.full_like(x[:, :, :1], -1.0).expand(-1, -1, self.count, -1, -1)
        parts = [x[:, :, : starts[0]]]
        for start, end in zip(starts, [*starts[1:], x.shape[2]], strict=True):
            parts += [black, x[:, :, start:end]]
        return torch.cat(parts, 2)
