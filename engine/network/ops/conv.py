"""Convolutions of a clip and of single frames, and the step that is one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import exact
from ...kernels.precision import tf32_asked
from ...options import Options
from ...precision.forms import Operands
from ...runtime.allowance import find_workspace
from ...runtime.context import ExecutionContext
from ...runtime.weights import Conv as Packed
from ..packed import outer_conv_of
from ..program import Step
from ..state import State
from ..tree import find, graft
from ..values import CAUSAL, Border, Result, Size, Style, Sums, Taps, Work


def _as_products(x: Tensor) -> bool:
    """Return whether x is convolved by exact.conv3d. TF32 is tested last: torch.compile breaks its graph there."""
    return not torch.is_grad_enabled() and exact.as_products(x.device, x.dtype, tf32=False) and not tf32_asked()


def _find_workspace(x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> None:
    """Call `find_workspace` for a convolution of x [B, C, T, H, W] by cuDNN."""
    if x.is_cuda:
        axes = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
        size = x.shape[0], len(weight), *((n + 2 * p - k) // s + 1 for n, k, s, p in axes)
        result = math.prod(size) * x.itemsize
        find_workspace(x.device, result, x.nbytes + weight.nbytes + result)


class ClipConv(nn.Conv3d):
    """Convolution of a clip: `after` of its taps in time look ahead, the others back.

    A clip starts with copies of its first frame, as many zero frames, or nothing (`head`); if the convolution looks
    ahead, the clip ends with copies of its last frame, or with zero frames if it starts with those. Later calls
    continue from the frames left in the State: everything after the last full step, so strides and late frames work
    with any chunking. A call may have no result yet. forgets: a first call of a single frame leaves nothing behind.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: tuple[int, int, int] = (3, 3, 3),
        stride: tuple[int, int, int] = (1, 1, 1),
        padding: int | None = None,
        head: Literal["replicate", "zero", "none"] = "replicate",
        border: Border = "zero",
        after: int = 0,
        forgets: bool = False,
    ) -> None:
        pad = kernel[1] // 2 if padding is None else padding
        super().__init__(c_in, c_out, kernel, stride, (0, pad, pad) if border == "zero" else (0, 0, 0))
        self.head, self.border, self.after, self.forgets = head, border, after, forgets
        self.edges = 0 if border == "zero" else pad
        self.key = ""

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        x = self._extended(x, state)
        if x.shape[2] < self.kernel_size[0]:
            return self._nothing(x)
        if self.edges:
            e = self.edges
            x = F.pad(x, (e, e, e, e, 0, 0), mode=self.border)
        if _as_products(x):
            return exact.conv3d(x, self.weight, self.bias, self.stride, self.padding)
        if not self.weight.is_contiguous():  # in channels_last_3d; CPU kernels do not follow the weight by themselves
            x = x.contiguous(memory_format=torch.channels_last_3d)
        _find_workspace(x, self.weight, self.stride, self.padding)
        return super().forward(x)

    def _extended(self, x: Tensor, state: State | None) -> Tensor:
        """Return x after its history and, at the clip's end, followed by the frames that `after` needs."""
        kt, step = self.kernel_size[0], self.stride[0]
        if kt == 1 or (x.shape[2] == 0 and self.starts(state)):
            return x
        history = None if state is None else state.histories.get(self.key)
        if history is None and state is not None and state.inside:
            # A part that starts after the clip's start has no history here; results made from this one are not read.
            history = x[:, :, :1].expand(-1, -1, kt - step, -1, -1)
        elif history is None and self.head != "none":
            history = x[:, :, :1] if self.head == "replicate" else torch.zeros_like(x[:, :, :1])
            history = history.expand(-1, -1, kt - 1 - self.after, -1, -1)
        forgets = self.forgets and x.shape[2] == 1 and self.starts(state)
        x = x if history is None else torch.cat((history.to(x), x), 2)
        if self.after and (state is None or state.ending):
            last = torch.zeros_like(x[:, :, -1:]) if self.head == "zero" else x[:, :, -1:]
            x = torch.cat((x, last.expand(-1, -1, self.after, -1, -1)), 2)
        if state is not None and not forgets:
            used = max((x.shape[2] - kt) // step + 1, 0) * step
            state.keep(self.key, x[:, :, used:])
        return x

    def _nothing(self, x: Tensor) -> Tensor:
        """Return a result with no frames, of the right size."""
        sizes = zip(x.shape[3:], self.kernel_size[1:], self.stride[1:], self.padding[1:], strict=True)
        height, width = ((n + 2 * (p or self.edges) - k) // s + 1 for n, k, s, p in sizes)
        return x.new_empty(x.shape[0], self.out_channels, 0, height, width)

    def starts(self, state: State | None) -> bool:
        """Return whether the next call is the first of its clip."""
        return state is None or not (state.inside or self.key in state.histories)


class FrameConv(nn.Conv2d):
    """A 2-D convolution of every frame, without history."""

    key, head = "", "zero"

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        weight, stride, padding = self.weight.unsqueeze(2), (1, *self.stride), (0, *self.padding)
        if _as_products(x):
            return exact.conv3d(x, weight, self.bias, stride, padding)
        _find_workspace(x, weight, stride, padding)
        return F.conv3d(x, weight, self.bias, stride, padding)


class FlatConv(FrameConv):
    """The same by the operator for pictures, with other last bits. On one thread of a CPU it took a tenth to all of the
    time of the one for clips (frames of 128x64 down to 16x8 positions, 64 to 512 channels)."""

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if _as_products(x):
            return super().forward(x, state)
        _find_workspace(x, self.weight.unsqueeze(2), (1, *self.stride), (0, *self.padding))
        frames = x[:, :, 0] if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
        y = F.conv2d(frames, self.weight, self.bias, self.stride, self.padding)
        return y.unflatten(0, (x.shape[0], -1)).transpose(1, 2)


class Matrix(nn.Linear):
    """A linear layer on the channels of every position of [B, C, T, H, W]."""

    key = ""

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        return super().forward(x.movedim(1, -1).to(self.weight.dtype)).movedim(-1, 1)


class OneConv(nn.Module):
    """A module with one convolution under the dotted name that files have for it."""

    def __init__(self, name: str, convolution: ClipConv | FrameConv) -> None:
        super().__init__()
        self._name = name
        graft(self, name, convolution)

    @property
    def convolution(self) -> ClipConv | FrameConv:
        return find(self, self._name)  # type: ignore[return-value]


def styled(c_in: int, c_out: int, style: Style) -> ClipConv | FrameConv:
    """Return a 3x3x3 or 1x3x3 convolution in the style of the Program."""
    if style.still:
        return FrameConv(c_in, c_out, 3, padding=1)
    return ClipConv(c_in, c_out, head=style.head, border=style.border, after=style.after, forgets=style.forgets)


def pointwise(c_in: int, c_out: int, style: Style) -> ClipConv | FrameConv:
    """Return a convolution of single positions."""
    return FrameConv(c_in, c_out, 1) if style.still else ClipConv(c_in, c_out, (1, 1, 1), head=style.head)


def taps_of(style: Style, convs: int = 1) -> Taps:
    """Return the taps of `convs` consecutive 3x3x3 or 1x3x3 convolutions."""
    return Taps(convs * (style.taps - 1 - style.after), convs * style.after)


def conv_work(size: Size, c_out: int, taps: int = 27, out: Size | None = None) -> Work:
    """Return the work of one convolution from `size` to `out` (the same positions if not given)."""
    source, target = math.prod(size[:3]), math.prod((out or size)[:3])
    flop = 2.0 * target * size.channels * c_out * taps
    return Work(flop, flop, source * size.channels + target * c_out)


@dataclass(frozen=True)
class Between(Step):
    """A step from `c_in` to `c_out` channels."""

    name: str
    c_in: int
    c_out: int

    def channels(self, channels: int) -> int:
        return self.c_out


@dataclass(frozen=True)
class Conv(Between):
    """A single 3x3x3 or 1x3x3 convolution, as the first step of a network.

    block: rows and columns beyond a multiple of this are cut off. repeats: the input is added to the result, every
    channel repeated to fill the result's channels.
    """

    block: int = 1
    repeats: bool = False
    looks_ahead = True

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: styled(self.c_in, self.c_out, style)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        h, w = self._whole(*x.shape[3:])
        x = x[..., :h, :w]
        y = part(self.name)(x, state)
        if not self.repeats:
            return y
        if state is not None:
            x = state.aligned(f"{self.name} repeats", x, y)
        return y + x.repeat_interleave(self.c_out // self.c_in, 1)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        return outer_conv_of(part(self.name), operands)

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        x = x[:, : out.shape[1], : out.shape[2]]
        if self.repeats and not run.dry:
            out.unflatten(3, (self.c_in, -1)).copy_(x[..., None])
        return out, run.conv(packed, x, out, groups=groups, residual=out if self.repeats else None)

    def size(self, size: Size, starts: bool) -> Size:
        return Size(size.frames, *self._whole(*size[1:3]), self.c_out)

    def ahead(self, packed: Packed) -> tuple[str, ...]:
        return (packed.key,)

    def taps(self, style: Style) -> Taps:
        return taps_of(style)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(self.size(size, True)._replace(channels=self.c_in), self.c_out, 9 * style.taps)

    def _whole(self, height: int, width: int) -> tuple[int, int]:
        return height // self.block * self.block, width // self.block * self.block
