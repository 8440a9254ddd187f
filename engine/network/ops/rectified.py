"""Steps of tiny autoencoders: 3x3 convolutions with ReLU and without norms, between latents and pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..program import Step
from ..state import State
from ..values import CAUSAL, Size, Style, Work
from .conv import Between, FrameConv, conv_work

WHY = "its convolutions end in ReLU, which only plain torch does"
#: Latents are limited softly to this on both sides of zero.
LIMIT = 3.0
#: Groups of the norm of a pool, and its channels for each of the block's.
GROUPS, WIDER = 4, 4
#: Log variance of a latent that has none.
NONE = -30.0


@dataclass(frozen=True)
class Scaled(Step):
    """Convert latents to the units of the network, (x - shift) * scale, and limit them; or (`leaves`) invert the former
    behind an encoder, and add a negligible variance. name, shift: parameters."""

    name: str
    shift: str
    leaves: bool = False
    plain_only = WHY
    wide = True

    def modules(self, style: Style) -> dict[str, nn.Module]:
        one, zero = (nn.Parameter(torch.full((), value)) for value in (1.0, 0.0))
        return {self.name: one, self.shift: zero}  # type: ignore[dict-item]

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        scale, shift = part(self.name), part(self.shift)
        if self.leaves:
            x = x.float() / scale + shift
            return torch.cat((x, torch.full_like(x, NONE)), 1)
        return torch.tanh((x - shift) * scale / LIMIT) * LIMIT

    def channels(self, channels: int) -> int:
        return 2 * channels if self.leaves else channels


@dataclass(frozen=True)
class Rectified(Between):
    """A 3x3 convolution, with ReLU if `relu`.

    to: "double": of repeated pixels, "half": of every second one; both without a bias. unit: pictures before it
    ("before") or after it ("after") are in 0..1, and outside in -1..1. block: rows and columns beyond a multiple of
    this are cut off."""

    relu: bool = False
    to: Literal["same", "double", "half"] = "same"
    unit: Literal["", "before", "after"] = ""
    block: int = 1
    plain_only = WHY

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return {"same": (1, 1), "double": (2, 1), "half": (1, 2)}[self.to]

    def modules(self, style: Style) -> dict[str, nn.Module]:
        how = {"padding": 1, "stride": 2 if self.to == "half" else 1, "bias": self.to == "same"}
        return {self.name: FrameConv(self.c_in, self.c_out, 3, **how)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        if self.block > 1:
            h, w = self._whole(*x.shape[3:])
            x = x[..., :h, :w]
        if self.unit == "before":
            x = x * 0.5 + 0.5
        if self.to == "double":
            x = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
        x = part(self.name)(x, state)
        if self.unit == "after":
            x = x * 2.0 - 1.0
        return F.relu(x) if self.relu else x

    def size(self, size: Size, starts: bool) -> Size:
        height, width = self._whole(*size[1:3])
        return super().size(size._replace(height=height, width=width), starts)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, 9, self.size(size, True))

    def _whole(self, height: int, width: int) -> tuple[int, int]:
        return height // self.block * self.block, width // self.block * self.block


class Pooled(nn.GroupNorm):
    """The norm of a pool over each picture [B, C, T, H, W] by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(Pooled, self).forward(picture) for picture in x.unbind(2)], 2)


class RectifiedBlock(nn.Module):
    """y = relu(c(relu(b(relu(a(x))))) + x) with 3x3 convolutions a, b, c; pooled: x += d(relu(norm(e(x)))) before, with
    1x1 convolutions without biases."""

    def __init__(self, width: int, pooled: bool) -> None:
        super().__init__()
        a, b, c = (FrameConv(width, width, 3, padding=1) for _ in range(3))
        self.conv = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c)
        self.pool: nn.Sequential | None = None
        if pooled:
            wide = WIDER * width
            e, d = FrameConv(width, wide, 1, bias=False), FrameConv(wide, width, 1, bias=False)
            self.pool = nn.Sequential(e, Pooled(GROUPS, wide), nn.ReLU(), d)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return F.relu(self.conv(x) + x)


@dataclass(frozen=True)
class RectifiedRes(Step):
    """A residual block of `width` channels. pooled: a part of it sees the whole picture."""

    name: str
    width: int
    pooled: bool = False
    plain_only = WHY

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: RectifiedBlock(self.width, self.pooled)}

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        taps = 3 * 9 + (2 * WIDER if self.pooled else 0)
        return conv_work(size, self.width, taps)
