"""Blocks that mix a picture's positions by a depthwise convolution and by means over the whole picture; products of
single positions lie between. Gates and norms may follow a time, which is constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...network.ops.conv import FrameConv, conv_work
from ...network.program import Step
from ...network.state import State
from ...network.tree import graft
from ...network.values import CAUSAL, Result, Size, Style, Sums, Work
from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import ExecutionContext
from ..ltx.conditioned import waves_of
from ..ltx_diffusion.diffusion import Embedding
from .kernels.mixing import blocks, gates, layer_normed, mixed

Part = Callable[[str], nn.Module]
#: Vectors of a block's modulation: shift, scale and gate of each of its two branches.
VECTORS = 6
#: Channels between the last two products, in relation to the block's.
RATIO = 4
EPS = 1e-6


class Depthwise(nn.Conv2d):
    """A 3x3 convolution of every channel of every frame, as a sum of shifted products: no library's choice of an
    algorithm, nor its TF32, has a say in it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[3:]
        padded = F.pad(x, (1, 1, 1, 1))
        total = self.bias.view(-1, 1, 1, 1).expand_as(x).clone()
        for row in range(3):
            for column in range(3):
                tap = self.weight[:, 0, row, column].view(-1, 1, 1, 1)
                total.addcmul_(padded[..., row : row + h, column : column + w], tap)
        return total


class Block(nn.Module):
    """The parameters of a block, and its eager execution. Norms have weights of their own, or (`conditioned`) take
    theirs from the time."""

    def __init__(self, width: int, conditioned: bool) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = FrameConv(width, width, 1), Depthwise(width), FrameConv(width, width, 1)
        self.conv4, self.conv5 = FrameConv(width, RATIO * width, 1), FrameConv(RATIO * width, width, 1)
        graft(self, "ca.1", FrameConv(width, width, 1))
        if conditioned:
            graft(self, "adaLN_modulation.1", nn.Linear(width, VECTORS * width))
        else:
            self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)

    def vectors(self, embedding: nn.Module | None) -> Tensor:
        """Return shift, scale and gate of both branches, float32 [6, C]; a norm is multiplied by its scale as it is."""
        if embedding is None:
            bias = self.norm1.bias
            ones = torch.ones(len(bias), dtype=torch.float32, device=bias.device)
            pairs = ((norm.bias.float(), norm.weight.float(), ones) for norm in (self.norm1, self.norm2))
            return torch.stack([vector for three in pairs for vector in three])
        last = self.adaLN_modulation[1]
        made = F.linear(at_rest(embedding), last.weight.float(), last.bias.float()).view(VECTORS, -1)
        made[1::3] += 1.0
        return made

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Execute the block on [B, C, T, H, W]; `vectors` is the result of `vectors`."""
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors.to(x.dtype)
        h = F.gelu(self.conv2(self.conv1(over_channels(x, scale1, shift1))))
        h = h * torch.sigmoid(self.ca[1](h.mean((3, 4), keepdim=True)))
        x = x + self.conv3(h) * gate1.view(-1, 1, 1, 1)
        h = self.conv5(F.gelu(self.conv4(over_channels(x, scale2, shift2))))
        return x + h * gate2.view(-1, 1, 1, 1)


def over_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return [B, C, T, H, W] normalised over the channels of each position."""
    return F.layer_norm(x.movedim(1, -1), (x.shape[1],), weight, bias, EPS).movedim(-1, 1)


def at_rest(embedding: nn.Module) -> Tensor:
    """Return the embedding of the time 0, float32 [C], as modulations read it."""
    h = waves_of(0.0, embedding.mlp[0].weight.device)
    for name in ("0", "2"):
        linear = embedding.mlp.get_submodule(name)
        h = F.silu(F.linear(h, linear.weight.float(), linear.bias.float()))
    return h


#: A product of positions: a matrix [C, K] to multiply with from the right, and its bias.
Matrix = tuple[Tensor, Tensor]


def matrix(layer: nn.Module, dtype: torch.dtype, gate: Tensor | float = 1.0) -> Matrix:
    """Return a 1x1 convolution, or a linear layer, whose results are multiplied by `gate` [K]."""
    weight, bias = layer.weight.float().flatten(1).t() * gate, layer.bias.float() * gate
    return weight.to(dtype), bias.to(dtype)


@dataclass(frozen=True)
class Packed:
    """Weights of a block. norm1, norm2: (weight, bias), float32. taps: float32 [9, C], with `taps_bias`. gate: float32
    [C, C] and [C], of the means. second: float32 [C, C], as its weight is multiplied by each picture's gates, with its
    bias. last_bias: float32, of `down`, which is added to the stream before the product is."""

    norm1: Matrix
    first: Matrix
    taps: Tensor
    taps_bias: Tensor
    gate: Matrix
    second: Matrix
    norm2: Matrix
    up: Matrix
    down: Tensor
    last_bias: Tensor


@dataclass(frozen=True)
class Mix(Step):
    """The step of one block, on the channels from `first` on.

    Attributes:
        width: its channels.
        first: channels before them, which stay as they are.
        embedding: the name of the embedding of its time; "" if its norms have weights of their own.
        owns: it is the first of the steps that share the embedding.
    """

    name: str
    width: int
    first: int = 0
    embedding: str = ""
    owns: bool = False
    in_place = True

    def modules(self, style: Style) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module] = {self.name: Block(self.width, bool(self.embedding))}
        return parts | ({self.embedding: Embedding(self.width)} if self.owns else {})

    def vectors(self, part: Part) -> Tensor:
        """Return the vectors of its modulation, as `Block.vectors` does."""
        return part(self.name).vectors(part(self.embedding) if self.embedding else None)

    def plain(self, part: Part, x: Tensor, state: State | None) -> Tensor:
        vectors = self.vectors(part) if state is None else state.once(self.name, lambda: self.vectors(part))
        if not self.first:
            return part(self.name)(x, vectors)
        return torch.cat((x[:, : self.first], part(self.name)(x[:, self.first :], vectors)), 1)

    def pack(self, part: Part, operands: Operands, options: Options) -> Packed:
        block, dtype = part(self.name), operands.dtype
        vectors = block.vectors(part(self.embedding) if self.embedding else None)
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors
        weight, bias = matrix(block.conv3, torch.float32, gate1)
        gate, gate_bias = matrix(block.ca[1], torch.float32)
        return Packed(
            (scale1, shift1), matrix(block.conv1, dtype),
            block.conv2.weight.float().flatten(1).t().contiguous(), block.conv2.bias.float(),
            (gate.t().contiguous(), gate_bias), (weight.t().contiguous(), bias.to(dtype)), (scale2, shift2),
            matrix(block.conv4, dtype), matrix(block.conv5, dtype, gate2)[0], block.conv5.bias.float() * gate2,
        )  # fmt: skip

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        """Return x, picture by picture, so that a product does not depend on the chunk."""
        p, (_, h, w, _), c = packed, x.shape, self.width
        n = h * w
        with run.arena.scope():
            normed, made, wide, scaled = run.take(n, c), run.take(n, c), run.take(n, RATIO * c), run.take(c, c)
            parts = run.arena.take((blocks(n), c), torch.float32)

            def product(flat: Tensor, of: Matrix, into: Tensor) -> None:
                run.attempt(torch.addmm, of[1], flat, of[0], out=into)

            for picture in x if not run.dry else ():
                stream = picture.view(n, -1)[:, self.first :]
                run.attempt(layer_normed, stream, *p.norm1, EPS, normed)
                product(normed, p.first, made)
                run.attempt(mixed, made.view(h, w, c), p.taps, p.taps_bias, normed.view(h, w, c), parts)
                run.attempt(gates, run.attempt(torch.sum, parts, 0), n, *p.gate, p.second[0], scaled)
                product(normed, (scaled.t(), p.second[1]), made)
                run.attempt(layer_normed, stream, *p.norm2, EPS, normed, more=(made, p.last_bias))
                product(normed, p.up, wide)
                torch.ops.aten.gelu_(wide)
                run.attempt(stream.addmm_, wide, p.down)
        return x, None

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        own = size._replace(channels=self.width)
        return conv_work(own, (2 + 2 * RATIO) * self.width, 1) + conv_work(own._replace(channels=1), self.width, 9)
