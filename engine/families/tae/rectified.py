"""Steps of tiny autoencoders: 3x3 convolutions with ReLU and without norms, between latents and pictures or frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...network.ops.conv import Between, FlatConv, FrameConv, conv_work
from ...network.program import Step
from ...network.state import State
from ...network.values import CAUSAL, Size, Style, Work
from ..ltx.depth import to_channels, to_samples

WHY = "its convolutions end in ReLU, which only plain torch does"
#: Latents are limited softly to this on both sides of zero.
LIMIT = 3.0
#: Groups of the norm of a pool, and its channels for each of the block's.
GROUPS, WIDER = 4, 4
#: Log variance of a latent that has none.
NONE = -30.0
#: Factor of values below zero in networks whose ReLU is leaky.
LEAK = 0.2


def rectified(x: Tensor, part: Callable[[str], nn.Module], leak: str) -> Tensor:
    """Return ReLU of x [B, C, T, H, W]; leak: parameter by which values below zero are multiplied, "" for none."""
    return F.prelu(x, part(leak).to(x.dtype).view(1)) if leak else F.relu(x)  # type: ignore[operator]


def leaking(leak: str) -> dict[str, nn.Module]:
    """Return the parameter `leak` of `rectified`, if there is one."""
    return {leak: nn.Parameter(torch.full((), LEAK))} if leak else {}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Scaled(Step):
    """Convert latents to the units of the network, (x - shift) * scale, and limit them; or (`leaves`) invert the former
    behind an encoder, and add a negligible variance.

    name, shift: parameters, a value for each of `width` channels (0: one value). limits: as the first step it
    limits latents."""

    name: str
    shift: str
    leaves: bool = False
    width: int = 0
    limits: bool = True
    plain_only = WHY
    wide = True

    def modules(self, style: Style) -> dict[str, nn.Module]:
        shape = (self.width,) if self.width else ()
        one, zero = (nn.Parameter(torch.full(shape, value)) for value in (1.0, 0.0))
        return {self.name: one, self.shift: zero}  # type: ignore[dict-item]

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        scale, shift = part(self.name), part(self.shift)
        if self.width:
            scale, shift = scale.view(-1, 1, 1, 1), shift.view(-1, 1, 1, 1)  # type: ignore[operator]
        if self.leaves:
            x = x.float() / scale + shift
            return torch.cat((x, torch.full_like(x, NONE)), 1)
        x = ((x - shift) * scale).to(x.dtype)
        return torch.tanh(x / LIMIT) * LIMIT if self.limits else x

    def channels(self, channels: int) -> int:
        return 2 * channels if self.leaves else channels


@dataclass(frozen=True)
class Rectified(Between):
    """A convolution of 3x3 positions, or of `side` times `side`, with ReLU if `relu`.

    to: "double": of repeated pixels, "half": of every second one. unit: pictures before it ("before") or after it
    ("after") are in 0..1, and outside in -1..1. block: rows and columns beyond a multiple of this are cut off. joined,
    parted: rows, and columns, of pixels that become channels before it, and that channels become after it and its ReLU.
    c_in, c_out: of the convolution. leak: as in `rectified`. bias: it has one (None: those that resample have none).
    flat: by the operator for pictures."""

    relu: bool = False
    to: Literal["same", "double", "half"] = "same"
    unit: Literal["", "before", "after"] = ""
    block: int = 1
    joined: int = 1
    parted: int = 1
    leak: str = ""
    bias: bool | None = None
    side: int = 3
    flat: bool = False
    plain_only = WHY

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        up, down = {"same": (1, 1), "double": (2, 1), "half": (1, 2)}[self.to]
        return up * self.parted, down * self.joined

    def modules(self, style: Style) -> dict[str, nn.Module]:
        bias = self.to == "same" if self.bias is None else self.bias
        how = {"padding": self.side // 2, "stride": 2 if self.to == "half" else 1, "bias": bias}
        conv = (FlatConv if self.flat else FrameConv)(self.c_in, self.c_out, self.side, **how)
        return {self.name: conv, **leaking(self.leak if self.relu else "")}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        if self.block > 1:
            h, w = self._whole(*x.shape[3:])
            x = x[..., :h, :w]
        if self.unit == "before":
            x = x * 0.5 + 0.5
        if self.joined > 1:
            x = to_channels(x, (1, self.joined, self.joined))
        if self.to == "double":
            x = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
        x = part(self.name)(x, state)
        x = rectified(x, part, self.leak) if self.relu else x
        if self.parted > 1:
            x = to_samples(x, (1, self.parted, self.parted))
        return x * 2.0 - 1.0 if self.unit == "after" else x

    def channels(self, channels: int) -> int:
        return self.c_out // self.parted**2

    def size(self, size: Size, starts: bool) -> Size:
        height, width = self._whole(*size[1:3])
        return super().size(size._replace(height=height, width=width), starts)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        made = self.size(size, True)
        made = made._replace(height=made.height // self.parted, width=made.width // self.parted)
        read = Size(size.frames, size.height // self.joined, size.width // self.joined, self.c_in)
        return conv_work(read, self.c_out, self.side**2, made)

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
