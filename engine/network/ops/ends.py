"""First and last steps other than plain convolutions: patches, the latent's linear step, moments, pixels; and linear
layers on every position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...kernels import norm_act
from ...kernels.conv3d import pack_weight
from ...kernels.to_pixels import MOST_OUTPUTS, columns_weight
from ...kernels.to_pixels import Pixels as Form
from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import ExecutionContext
from ...runtime.weights import Conv, Output
from ..packed import clip_kernel, norm_of, outer_conv_of
from ..program import Step
from ..state import State
from ..tree import find, graft
from ..values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from .conv import Between, ClipConv, Matrix, conv_work, pointwise, styled, taps_of
from .norm import Norm, Normed
from .shortcut import mean


def patches(x: Tensor, n: int = 2) -> Tensor:
    """Turn squares of pixels into channels: [B, C, T, H, W] -> [B, n * n * C, T, H / n, W / n], channel (c * n +
    column) * n + row."""
    b, c, t, h, w = x.shape
    return x.reshape(b, c, t, h // n, n, w // n, n).permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def pixels(x: Tensor, n: int = 2) -> Tensor:
    """Invert `patches`."""
    b, c, t, h, w = x.shape
    c //= n * n
    return x.view(b, c, n, n, t, h, w).permute(0, 1, 4, 5, 3, 6, 2).reshape(b, c, t, n * h, n * w)


@dataclass(frozen=True)
class Patches(Step):
    """Turn squares of `patch` x `patch` pixels into channels; rows and columns beyond a multiple of `block` pixels are
    cut off."""

    name: str
    block: int
    patch: int = 2
    wide = True
    stream: ClassVar[bool] = False

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return 1, self.patch

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        h, w = (n // self.block * self.block for n in x.shape[3:])
        return patches(x[..., :h, :w], self.patch)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> None:
        return None

    def run(self, packed: None, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        (f, h, w, _), n = out.shape, self.patch
        blocks = x[:, : n * h, : n * w].unflatten(2, (w, n)).unflatten(1, (h, n)).permute(0, 1, 3, 5, 4, 2)
        out.view(f, h, w, 3, n, n).copy_(blocks)
        return out, None

    def size(self, size: Size, starts: bool) -> Size:
        h, w = (n // self.block * self.block // self.patch for n in size[1:3])
        return Size(size.frames, h, w, self.channels(size.channels))

    def channels(self, channels: int) -> int:
        return self.patch**2 * channels


@dataclass(frozen=True)
class Fourier(Step):
    """Append sines and cosines of every channel, at 2^`first` and further waves up to 2^`last` per unit. They stay in
    fp32 until the next step rounds them: a wave of a pixel in fp16 may be 0.03 turns off, of one in bf16 a quarter."""

    name: str
    first: int = 6
    last: int = 7
    stream: ClassVar[bool] = False
    exact_input = True
    plain_only = "it begins with waves of its pixels, which only plain torch does"

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        waves = torch.arange(self.first, self.last + 1, device=x.device)
        turns = x[:, :, None] * (2.0**waves * (2 * math.pi))[:, None, None, None]
        turns = turns.flatten(1, 2)
        return torch.cat((x, turns.sin(), turns.cos()), 1)

    def channels(self, channels: int) -> int:
        return channels * (1 + 2 * (self.last - self.first + 1))


@dataclass(frozen=True)
class PackedLinear:
    weight: Tensor  # [C, K]
    bias: Tensor

    @classmethod
    def of(cls, layer: nn.Module) -> PackedLinear:
        """Pack a matrix, or a convolution of single positions, with a bias or without."""
        weight = layer.weight.float().flatten(1).t().contiguous()
        return cls(weight, weight.new_zeros(weight.shape[1]) if layer.bias is None else layer.bias.float())


@dataclass(frozen=True)
class Linear(Step):
    """A 1x1x1 convolution in fp32, for the latent's few channels, where rounding would be amplified. c_out: channels of
    the result, if they differ from the input's (0: the same)."""

    name: str
    width: int
    c_out: int = 0
    wide = True
    stream: ClassVar[bool] = False

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: pointwise(self.width, self.channels(self.width), style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> PackedLinear:
        return PackedLinear.of(part(self.name))

    def run(self, packed: PackedLinear, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        if not run.dry:  # frame by frame, so that the product does not depend on the chunk
            for source, target in zip(x.float(), out, strict=True):
                flat = source.reshape(-1, self.width)
                torch.addmm(packed.bias, flat, packed.weight, out=target.view(-1, target.shape[-1]))
        return out, None

    def channels(self, channels: int) -> int:
        return self.c_out or self.width

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.channels(self.width), 1)


class _End(Normed):
    """A norm and a last convolution."""

    norm_name: str
    name: str
    c_in: int
    norm: Norm
    below = False
    looks_ahead = True
    stream: ClassVar[bool] = False

    @property
    def c_out(self) -> int:
        raise NotImplementedError

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.norm_name: self.norm.module(self.c_in), self.name: styled(self.c_in, self.c_out, style)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        return part(self.name)(self.normed(part, x, state), state)

    def normed(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        """Return x after the norm."""
        return part(self.norm_name)(x, state)

    def ahead(self, packed: PackedEnd) -> tuple[str, ...]:
        return (packed.conv.key,)

    def taps(self, style: Style) -> Taps:
        return taps_of(style)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, 9 * style.taps)


@dataclass(frozen=True)
class PackedEnd:
    norm: norm_act.Norm
    conv: Conv


@dataclass(frozen=True)
class Moments(_End):
    """Mean and log variance of the latent, in fp32. means: the means of neighbouring input channels are added."""

    norm_name: str
    name: str
    c_in: int
    width: int
    norm: Norm
    means: bool = False
    wide = True

    @property
    def c_out(self) -> int:
        return self.width

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        y = super().plain(part, x, state)
        if not self.means:
            return y
        if state is not None:
            x = state.aligned(f"{self.name} means", x, y)
        return y + mean(x.unflatten(1, (self.width, -1)), 2)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> PackedEnd:
        return PackedEnd(norm_of(part(self.norm_name)), outer_conv_of(part(self.name), operands))

    def run(self, packed: PackedEnd, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        if out is None:
            out = run.arena.take((*x.shape[:3], self.width), torch.float32)
        if self.means and not run.dry:
            torch.mean(x.unflatten(3, (self.width, -1)), 4, dtype=torch.float32, out=out)
        run.conv(packed.conv, x, out, packed.norm, sums, residual=out if self.means else None)
        return out, None

    def channels(self, channels: int) -> int:
        return self.width


@dataclass(frozen=True)
class Pixels(_End):
    """The step to pixels. patch: pixels per side that its channels hold. colours: channels of a pixel; numbers other
    than three are written unchanged."""

    norm_name: str
    name: str
    c_in: int
    norm: Norm
    patch: int = 1
    colours: int = 3

    @property
    def c_out(self) -> int:
        return self.colours * self.patch**2

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return self.patch, 1

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        x = super().plain(part, x, state)
        return pixels(x, self.patch) if self.patch > 1 else x

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> PackedEnd:
        norm, conv = norm_of(part(self.norm_name)), part(self.name)
        if self.patch > 1:
            return PackedEnd(norm, outer_conv_of(conv, operands))
        weight = pack_weight(clip_kernel(conv.weight), operands.dtype)
        columns = columns_weight(weight) if self.colours <= MOST_OUTPUTS else None
        return PackedEnd(norm, Output(conv.key, weight, conv.bias.float(), columns))

    def store(self, packed: PackedEnd, run: ExecutionContext, x: Tensor, sums: Sums, output: torch.dtype,
              form: Form) -> Tensor:  # fmt: skip
        """Return finished pixels [D, H * patch, W * patch, colours] of type `output` for x [D, H, W, C]."""
        _, h, w, _ = x.shape
        m, _ = run.foresee(self.ahead(packed), x.shape[0], run.drains)
        if self.patch == 1:
            out = run.arena.take((m, h, w, self.colours), output)
            run.pixels(packed.conv, x, packed.norm, sums, out, form)
            return out
        n, c = self.patch, self.colours
        out = run.arena.take((m, n * h, n * w, c), output)
        blocks = run.arena.take((m, h, w, self.c_out), output)
        run.conv(packed.conv, x, blocks, packed.norm, sums, pixels=form)
        # The order of channels is (c * n + column) * n + row.
        out.view(m, h, n, w, n, c).copy_(blocks.view(m, h, w, c, n, n).permute(0, 1, 5, 2, 4, 3))
        return out

    def channels(self, channels: int) -> int:
        return self.colours


class _LinearEnd(Step):
    """A last step of single positions."""

    c_out: int

    def taps(self, style: Style) -> Taps:
        return Taps()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, 1)


@dataclass(frozen=True)
class LinearMoments(_LinearEnd, Moments):
    """Moments by a linear layer without bias."""

    plain_only = "its moments come of a linear layer, which only plain torch does"

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.norm_name: self.norm.module(self.c_in), self.name: Matrix(self.c_in, self.c_out, bias=False)}


@dataclass(frozen=True)
class LinearPixels(_LinearEnd, Pixels):
    """Pixels by a linear layer."""

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.norm_name: self.norm.module(self.c_in), self.name: Matrix(self.c_in, self.c_out)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> PackedEnd:
        layer = part(self.name)
        # The kernel that stores pixels takes 3x3 convolutions.
        kernel = torch.nn.functional.pad(layer.weight[:, :, None, None, None], (1, 1, 1, 1))
        weight = pack_weight(kernel, operands.dtype)
        norm = norm_of(part(self.norm_name))
        return PackedEnd(norm, Output(layer.key, weight, layer.bias.float(), columns_weight(weight)))


@dataclass(frozen=True)
class Pointwise(Between):
    """A linear layer. matrix: it is stored as a matrix, with a bias or without. layer: its name within that of the
    step."""

    matrix: bool = False
    bias: bool = True
    layer: str = ""
    stream: ClassVar[bool] = False

    def modules(self, style: Style) -> dict[str, nn.Module]:
        if self.matrix:
            layer: nn.Module = Matrix(self.c_in, self.c_out, self.bias)
        else:
            layer = ClipConv(self.c_in, self.c_out, (1, 1, 1))
        if not self.layer:
            return {self.name: layer}
        outer = nn.Module()
        graft(outer, self.layer, layer)
        return {self.name: outer}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        return self._layer(part)(x, state)

    def _layer(self, part: Callable[[str], nn.Module]) -> nn.Module:
        return find(part(self.name), self.layer) if self.layer else part(self.name)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> PackedLinear:
        return PackedLinear.of(self._layer(part))

    def run(self, packed: PackedLinear, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        if not run.dry:  # frame by frame, so that the product does not depend on the chunk
            for source, target in zip(x, out, strict=True):
                flat = source.float().reshape(-1, self.c_in)
                target.view(-1, self.c_out).copy_(torch.addmm(packed.bias, flat, packed.weight))
        return out, None

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, 1)
