"""Ends of networks that work on patches of pixels: a patch becomes a position's channels; two streams of channels
become the pixels of every patch by a small network for each pixel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.norm_act import Norm as PackedNorm
from ...kernels.to_pixels import Pixels as Form
from ...network.ops.conv import FrameConv, conv_work, styled
from ...network.ops.ends import _End
from ...network.ops.norm import Norm
from ...network.packed import conv_of, norm_of
from ...network.program import Step
from ...network.state import State
from ...network.tree import graft
from ...network.values import CAUSAL, Result, Size, Style, Sums, Work
from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import ExecutionContext
from ...runtime.weights import Conv
from .kernels.mixing import layer_normed
from .kernels.patch_pixels import PatchNetwork, patch_pixels
from .mixing import EPS, Matrix, matrix, over_channels

Part = Callable[[str], nn.Module]
COLOURS = 3
#: Frequencies of a pixel's place in its patch, along each axis, and the largest of them.
WAVES = 8
#: The kernel's products have at least so many columns.
LEAST_FEATURES = 16
#: Positions whose pixels eager execution computes at once.
POSITIONS = 1024


@dataclass(frozen=True)
class PatchEmbed(Step):
    """Turn each patch of `patch` x `patch` pixels into one position; rows and columns that fill none are cut off."""

    name: str
    c_in: int
    c_out: int
    patch: int

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return 1, self.patch

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: nn.Conv2d(self.c_in, self.c_out, self.patch, self.patch)}

    def plain(self, part: Part, x: Tensor, state: State | None) -> Tensor:
        b, c, t, h, w = x.shape
        n, conv = self.patch, part(self.name)
        blocks = x[..., : h // n * n, : w // n * n].reshape(b, c, t, h // n, n, w // n, n)
        flat = blocks.permute(0, 2, 3, 5, 1, 4, 6).flatten(4)
        return F.linear(flat, conv.weight.flatten(1), conv.bias).permute(0, 4, 1, 2, 3)

    def pack(self, part: Part, operands: Operands, options: Options) -> Matrix:
        return matrix(part(self.name), operands.dtype)

    def run(self, packed: Matrix, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        _, h, w, _ = out.shape
        n, (weight, bias) = self.patch, packed
        with run.arena.scope():
            flat = run.take(h * w, self.c_in * n * n)
            for picture, target in zip(x, out, strict=True) if not run.dry else ():
                patches = picture[: n * h, : n * w].unflatten(1, (w, n)).unflatten(0, (h, n)).permute(0, 2, 4, 1, 3)
                flat.view(h, w, self.c_in, n, n).copy_(patches)
                run.attempt(torch.addmm, bias, flat, weight, out=target.view(h * w, -1))
        return out, None

    def channels(self, channels: int) -> int:
        return self.c_out

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, self.patch**2, self.size(size, True))


@dataclass(frozen=True)
class Fuse(Step):
    """Two products of single positions, `down` and `name`; the second reads the first's result beside that of a third,
    `other`, of a position of zeros: its bias."""

    down: str
    other: str
    name: str
    c_in: int
    c_out: int
    zeros: int

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {
            self.down: FrameConv(self.c_in, self.c_out, 1), self.other: FrameConv(self.zeros, self.c_out, 1),
            self.name: FrameConv(2 * self.c_out, self.c_out, 1),
        }  # fmt: skip

    def plain(self, part: Part, x: Tensor, state: State | None) -> Tensor:
        x = part(self.down)(x)
        return part(self.name)(torch.cat((x, part(self.other).bias.view(-1, 1, 1, 1).expand_as(x)), 1))

    def pack(self, part: Part, operands: Operands, options: Options) -> Matrix:
        """Return both products as one."""
        down, other, last = part(self.down), part(self.other), part(self.name)
        (one, two), dtype = last.weight.double().flatten(1).chunk(2, 1), operands.dtype
        bias = last.bias.double() + one @ down.bias.double() + two @ other.bias.double()
        return (one @ down.weight.double().flatten(1)).t().to(dtype), bias.to(dtype)

    def run(self, packed: Matrix, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        weight, bias = packed
        for picture, target in zip(x, out, strict=True) if not run.dry else ():
            run.attempt(torch.addmm, bias, picture.view(-1, self.c_in), weight, out=target.view(-1, self.c_out))
        return out, None

    def channels(self, channels: int) -> int:
        return self.c_out

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, 1)


@dataclass(frozen=True)
class LayerMoments(Step):
    """Mean and log variance of the latent, by a norm over channels and a product."""

    norm_name: str
    name: str
    c_in: int
    c_out: int
    wide = True
    stream: ClassVar[bool] = False

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.norm_name: nn.LayerNorm(self.c_in, EPS), self.name: FrameConv(self.c_in, self.c_out, 1)}

    def plain(self, part: Part, x: Tensor, state: State | None) -> Tensor:
        norm = part(self.norm_name)
        return part(self.name)(over_channels(x, norm.weight, norm.bias))

    def pack(self, part: Part, operands: Operands, options: Options) -> tuple[Matrix, Matrix]:
        norm = part(self.norm_name)
        return (norm.weight.float(), norm.bias.float()), matrix(part(self.name), torch.float32)

    def run(self, packed: tuple[Matrix, Matrix], run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None,
            groups: int, first: int) -> Result:  # fmt: skip
        norm, (weight, bias) = packed
        with run.arena.scope():
            normed = run.arena.take((x.shape[1] * x.shape[2], self.c_in), torch.float32)
            for picture, target in zip(x, out, strict=True) if not run.dry else ():
                run.attempt(layer_normed, picture.view(-1, self.c_in), *norm, EPS, normed)
                run.attempt(torch.addmm, bias, normed, weight, out=target.view(-1, self.c_out))
        return out, None

    def channels(self, channels: int) -> int:
        return self.c_out

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, 1)


@dataclass(frozen=True)
class PackedTwice:
    norm: PackedNorm
    conv: Conv
    product: Matrix


@dataclass(frozen=True)
class Twice(_End):
    """A norm and a convolution, whose result goes on beside a product of itself: the stream has both. The product reads
    `zeros` channels of zeros before the result, for which files have a layer: `unread`."""

    norm_name: str
    name: str
    product: str
    unread: str
    c_in: int
    zeros: int
    patch: int
    norm: Norm
    below = True
    stream: ClassVar[bool] = True

    @property
    def c_out(self) -> int:
        return self.c_in

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {
            self.norm_name: self.norm.module(self.c_in), self.name: styled(self.c_in, self.c_in, style),
            self.unread: nn.Conv2d(COLOURS, self.zeros, self.patch, self.patch, bias=False),
            self.product: FrameConv(self.zeros + self.c_in, self.c_in, 1),
        }  # fmt: skip

    def plain(self, part: Part, x: Tensor, state: State | None) -> Tensor:
        x, product = super().plain(part, x, state), part(self.product)
        made = F.linear(x.movedim(1, -1), product.weight[:, self.zeros :, 0, 0], product.bias)
        return torch.cat((x, made.movedim(-1, 1)), 1)

    def pack(self, part: Part, operands: Operands, options: Options) -> PackedTwice:
        layer = part(self.product)
        product = layer.weight[:, self.zeros :].flatten(1).t().to(operands.dtype), layer.bias.to(operands.dtype)
        return PackedTwice(norm_of(part(self.norm_name)), conv_of(part(self.name), operands), product)

    def run(self, packed: PackedTwice, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        c, (weight, bias) = self.c_in, packed.product
        run.conv(packed.conv, x, out[..., :c], packed.norm, sums)
        with run.arena.scope():
            made = run.take(x.shape[1] * x.shape[2], c)
            for picture in out if not run.dry else ():
                flat = picture.view(-1, 2 * c)
                run.attempt(torch.addmm, bias, flat[:, :c], weight, out=made)
                flat[:, c:] = made
        return out, None

    def channels(self, channels: int) -> int:
        return 2 * self.c_in

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_in, 10)


class PixelBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, EPS)
        graft(self, "mlp.0", nn.Linear(width, width))
        graft(self, "mlp.2", nn.Linear(width, width))
        graft(self, "adaLN_modulation.1", nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation[1](y).chunk(3, -1)
        h = self.in_ln(x) * (1 + scale) + shift
        return x + gate * self.mlp[2](F.silu(self.mlp[0](h)))


class Scaled(nn.Module):
    """The weight of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


@dataclass(frozen=True)
class PatchPixels(Step):
    """Turn every position's two streams of channels into its patch of pixels: of the first, `features` values for each
    pixel; of the second, as many that modulate the small network which turns the former into a colour.

    Attributes:
        width: channels of one stream.
        layers: blocks of the small network.
    """

    width: int
    features: int
    layers: int
    patch: int
    name: str = "dec_net"
    stream: ClassVar[bool] = False

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return self.patch, 1

    def modules(self, style: Style) -> dict[str, nn.Module]:
        f, count = self.features, self.features * self.patch**2
        parts: dict[str, nn.Module] = {
            "y_embedder_x": nn.Conv2d(self.width, count, 1),
            "x_embedder.embedder.0": nn.Linear(COLOURS + f + WAVES**2, f),
            f"{self.name}.cond_embed": nn.Linear(self.width, count), f"{self.name}.input_proj": nn.Linear(f, f),
            "final_layer.norm": Scaled(f), "final_layer.linear": nn.Linear(f, COLOURS),
        }  # fmt: skip
        return parts | {f"{self.name}.res_blocks.{i}": PixelBlock(f) for i in range(self.layers)}

    def plain(self, part: Part, x: Tensor, state: State | None) -> Tensor:
        b, _, t, h, w = x.shape
        rows, n = x.permute(0, 2, 3, 4, 1).reshape(-1, 2 * self.width), self.patch
        made = x.new_empty(len(rows), n * n, COLOURS)
        places = self._places(part).to(x.dtype)
        for own, out in zip(rows.split(POSITIONS), made.split(POSITIONS), strict=True):
            out.copy_(self._pixels(part, own, places))
        return made.view(b, t, h, w, n, n, COLOURS).permute(0, 6, 1, 2, 4, 3, 5).reshape(b, COLOURS, t, n * h, n * w)

    def pack(self, part: Part, operands: Operands, options: Options) -> PatchNetwork:
        f, n, dtype = self.features, self.patch**2, operands.dtype
        wide = max(LEAST_FEATURES, 1 << (f - 1).bit_length())
        first, first_bias = self._first(part)
        second = part(f"{self.name}.cond_embed")
        layers = [part(f"{self.name}.res_blocks.{i}") for i in range(self.layers)]
        products = torch.stack([
            torch.cat((layer.adaLN_modulation[1].weight.unflatten(0, (3, f)), layer.mlp[0].weight[None],
                       layer.mlp[2].weight[None])) for layer in layers
        ])  # fmt: skip
        vectors = torch.stack([
            torch.cat([t.float().view(-1, f) for t in (layer.adaLN_modulation[1].bias, layer.in_ln.weight,
                       layer.in_ln.bias, layer.mlp[0].bias, layer.mlp[2].bias)]) for layer in layers
        ])  # fmt: skip
        vectors[:, 1] += 1.0
        end = part("final_layer.linear")

        def padded(t: Tensor, axes: int, kind: torch.dtype) -> Tensor:
            """Return t, which has features along so many of its last axes."""
            return F.pad(t, (0, wide - f) * axes).to(kind).contiguous()

        def stream(t: Tensor) -> Tensor:
            return F.pad(t, (0, 0, 0, wide - f)).to(dtype).contiguous()

        return PatchNetwork(
            stream(first), padded(first_bias, 1, torch.float32),
            stream(second.weight.view(n, f, self.width)), padded(second.bias.view(n, f), 1, torch.float32),
            padded(products, 2, dtype), padded(vectors, 1, torch.float32),
            padded(end.weight.float() * part("final_layer.norm").weight.float(), 1, torch.float32), end.bias.float(), f,
        )  # fmt: skip

    def _first(self, part: Part) -> Matrix:
        """Return weight [patch^2, features, width] and bias [patch^2, features], float64, of the three layers before
        the first activation, as one. Their own weights are freed with the call."""
        f, n = self.features, self.patch**2
        values, entry, last = part("y_embedder_x"), part("x_embedder.embedder.0"), part(f"{self.name}.input_proj")
        both = last.weight.double() @ entry.weight[:, COLOURS : COLOURS + f].double()
        weight = torch.einsum("fj,jpc->pfc", both, values.weight.double().view(f, n, self.width))
        places = self._places(part).double() @ last.weight.double().t() + last.bias.double()
        return weight, values.bias.double().view(f, n).t() @ both.t() + places

    def store(self, packed: PatchNetwork, run: ExecutionContext, x: Tensor, sums: Sums, output: torch.dtype,
              form: Form) -> Tensor:  # fmt: skip
        """Return finished pixels [D, H * patch, W * patch, 3] of type `output` for x [D, H, W, 2 width]."""
        d, h, w, _ = x.shape
        out = run.arena.take((d, self.patch * h, self.patch * w, COLOURS), output)
        if not run.dry:
            run.attempt(patch_pixels, x, packed, EPS, out, pixels=form, health=run.health)
        return out

    def _places(self, part: Part) -> Tensor:
        """Return what a pixel's place in its patch adds to its features, float32 [patch^2, features]."""
        first = part("x_embedder.embedder.0")
        return F.linear(waves(self.patch, first.weight.device), first.weight[:, -(WAVES**2) :].float(),
                        first.bias.float())  # fmt: skip

    def _pixels(self, part: Part, rows: Tensor, places: Tensor) -> Tensor:
        """Return the pixels of positions [R, 2 width]: [R, patch^2, 3]."""
        first, second = rows.split(self.width, 1)
        values, entry = part("y_embedder_x"), part("x_embedder.embedder.0")
        x = F.linear(first, values.weight.flatten(1), values.bias).unflatten(1, (self.features, -1)).transpose(1, 2)
        x = F.linear(x, entry.weight[:, COLOURS : COLOURS + self.features]) + places
        x = part(f"{self.name}.input_proj")(x)
        y = F.silu(part(f"{self.name}.cond_embed")(second).unflatten(1, (-1, self.features)))
        for i in range(self.layers):
            x = part(f"{self.name}.res_blocks.{i}")(x, y)
        wide = x.float()
        x = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * part("final_layer.norm").weight.float()
        return part("final_layer.linear")(x.to(rows.dtype))

    def size(self, size: Size, starts: bool) -> Size:
        return Size(size.frames, self.patch * size.height, self.patch * size.width, COLOURS)

    def channels(self, channels: int) -> int:
        return COLOURS

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        f = self.features
        of_pixel = 2 * self.width * f + (COLOURS + WAVES**2 + 2 * f) * f + 5 * self.layers * f**2 + COLOURS * f
        flop = 2.0 * math.prod(size[:3]) * self.patch**2 * of_pixel
        return Work(flop, flop)


def waves(patch: int, device: torch.device) -> Tensor:
    """Return the cosines of the pixels of a patch, row by row, float32 [patch^2, 64]: index 8 i + j has frequency i of
    the column and j of the row."""
    # On the CPU, also for the meta device: there torch imports its compiler for this function.
    place = torch.linspace(0, 1, patch, device="cpu", dtype=torch.float32)
    rates = torch.linspace(0, WAVES, WAVES, device="cpu", dtype=torch.float32)
    one = torch.cos(torch.pi * place[:, None] * rates)
    made = one[None, :, :, None] * one[:, None, None, :] / (1 + rates[:, None] * rates)
    return made.reshape(patch**2, WAVES**2).to(device)
