"""Attention among the positions of each frame, of a whole clip, or among the frames of each position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import ExecutionContext
from ...runtime.weights import Attention as Packed
from ..packed import norm_of
from ..program import Step
from ..state import State
from ..tree import find, graft
from ..values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from .conv import ClipConv
from .norm import Norm, Normed


class FrameAttention(nn.Module):
    """Single-head attention among the H*W positions of each frame, or (`whole`) the T*H*W of a clip, with a residual.

    Subclasses own the parts: a `norm` without activation, and the four projections as (weight [C, C], bias [C]).
    earlier: those of a clip attend to no position of a later frame.
    """

    norm: nn.Module
    whole = earlier = False

    def normed(self) -> nn.Module:
        """Return the norm, whatever its name."""
        return self.norm

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        """Return (weight, bias) for queries, keys, values and the result."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        b, c, t, h, w = x.shape
        tokens = self.normed()(x).permute(0, 2, 3, 4, 1).reshape(b * t, 1, h * w, c)
        if self.whole:
            tokens = tokens.view(b, 1, t * h * w, c)
        *inputs, output = self.projections()
        # No names for queries, keys and values: they would lie in memory beside the last product.
        y = self._attended(*(F.linear(tokens, *p) for p in inputs), h * w)
        y = F.linear(y, *output).reshape(b, t, h, w, c).permute(0, 4, 1, 2, 3)
        return x + y

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, frame: int) -> Tensor:
        if not self.earlier:
            return F.scaled_dot_product_attention(q, k, v)
        # Frame by frame, without a mask as large as all scores.
        frames = zip(q.split(frame, 2), range(frame, q.shape[2] + 1, frame), strict=True)
        return torch.cat([F.scaled_dot_product_attention(f, k[:, :, :end], v[:, :, :end]) for f, end in frames], 2)


@dataclass(frozen=True)
class Parts:
    """Names of the parts of an attention in a family's files, with one matrix each for queries, keys, values and the
    result. `convs`: the matrices are 1x1 (2) or 1x1x1 convolutions (3)."""

    norm: str = "group_norm"
    q: str = "to_q"
    k: str = "to_k"
    v: str = "to_v"
    out: str = "to_out.0"
    convs: int = 0


PARTS = Parts()


class SplitAttention(FrameAttention):
    """Attention with one matrix each for queries, keys and values; the default names are those of diffusers."""

    def __init__(self, channels: int, norm: Norm, parts: Parts = PARTS) -> None:
        super().__init__()
        self._parts = parts
        graft(self, parts.norm, norm.module(channels, act=False))
        for name in (parts.q, parts.k, parts.v, parts.out):
            made = nn.Conv3d if parts.convs == 3 else nn.Conv2d
            graft(self, name, made(channels, channels, 1) if parts.convs else nn.Linear(channels, channels))

    @property
    def norm(self) -> nn.Module:
        return find(self, self._parts.norm)

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        names = (self._parts.q, self._parts.k, self._parts.v, self._parts.out)
        return [(p.weight.flatten(1), p.bias) for p in (find(self, name) for name in names)]


class JointAttention(FrameAttention):
    """Attention whose queries, keys and values come from one 1x1 convolution."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm.module(channels, act=False, axes=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        weights, biases = self.to_qkv.weight.flatten(1).chunk(3), self.to_qkv.bias.chunk(3)
        return [*zip(weights, biases, strict=True), (self.proj.weight.flatten(1), self.proj.bias)]


@dataclass(frozen=True)
class Attention(Normed):
    """The attention step. joint: the file has one matrix for queries, keys and values. parts: the names of the
    matrices, where there are several. whole: attention among the positions of a clip, not of each frame."""

    name: str
    width: int
    norm: Norm
    joint: bool = False
    parts: Parts = PARTS
    whole: bool = False
    in_place = True
    #: Side of the windows that it stays within; 0: there are none.
    window: ClassVar[int] = 0

    def modules(self, style: Style) -> dict[str, nn.Module]:
        split = not self.joint
        module = SplitAttention(self.width, self.norm, self.parts) if split else JointAttention(self.width, self.norm)
        module.whole = self.whole
        return {self.name: module}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        block, dtype = part(self.name), operands.dtype
        q, k, v, out = ((weight.to(dtype).t(), bias.to(dtype)) for weight, bias in block.projections())
        return Packed(norm_of(block.normed()), q, k, v, out, options.flash_attention, self.whole)

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        return x, run.attend(packed, x, sums)

    def taps(self, style: Style) -> Taps:
        return Taps(math.inf, math.inf) if self.whole else Taps()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        tokens, c = size.height * size.width, self.width
        seen = tokens * size.frames if self.whole else tokens
        flop = size.frames * (4 * 2.0 * tokens * c * c + 4.0 * tokens * seen * c)
        return Work(flop, flop)


class EarlierPositions(Attention):
    """The step of a whole clip in which no position attends to a later frame."""

    plain_only = "it has attention to earlier frames of a clip, which only plain torch does"

    def modules(self, style: Style) -> dict[str, nn.Module]:
        made = super().modules(style)
        made[self.name].earlier = True
        return made


#: Names of the convolutions for queries, keys, values and the result.
CONVS = ("q", "k", "v", "proj_out")


class ConvAttention(FrameAttention):
    """Attention among a frame's positions, with a 1x1x1 convolution for each projection."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        graft(self, "norm.norm", norm.module(channels, act=False))
        for name in CONVS:
            graft(self, f"{name}.conv3d", ClipConv(channels, channels, (1, 1, 1)))

    def normed(self) -> nn.Module:
        return find(self, "norm.norm")

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        convs = [find(self, f"{name}.conv3d") for name in CONVS]
        return [(c.weight.flatten(1), c.bias) for c in convs]


class EarlierFrames(ConvAttention):
    """Attention among a position's frames up to its own; their keys and values are kept for the whole clip."""

    key = ""

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        tokens = self.normed()(x).permute(0, 3, 4, 2, 1).flatten(0, 2)  # [B * H * W, T, C]
        *inputs, output = self.projections()
        q, k, v = (F.linear(tokens, *p) for p in inputs)
        if state is not None and self.key in state.histories:
            k, v = (torch.cat(both, 1) for both in zip(state.histories[self.key].to(x).unbind(1), (k, v), strict=True))
        if state is not None:
            state.keep(self.key, torch.stack((k, v), 1))
        # Each frame is computed separately, so that later frames do not change it.
        past = k.shape[1] - q.shape[1]
        y = [F.scaled_dot_product_attention(q[:, i : i + 1], k[:, : past + i + 1], v[:, : past + i + 1])
             for i in range(q.shape[1])]  # fmt: skip
        y = F.linear(torch.cat(y, 1), *output) if y else q
        b, _, _, h, w = x.shape
        return x + y.unflatten(0, (b, h, w)).permute(0, 4, 3, 1, 2)


class WholeClip(nn.Module):
    """Attention among all frames of a position, in heads whose queries and keys have length 1. The frames wait until
    the clip ends."""

    key = ""

    def __init__(self, channels: int, norm: Norm, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm = norm.module(channels, act=False)
        graft(self, "attn.qkv", nn.Linear(channels, 3 * channels, bias=False))
        graft(self, "attn.out", nn.Linear(channels, channels))

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if state is not None:
            if not state.ending:
                state.waiting[self.key].append(x)
                return x.new_empty(*x.shape[:2], 0, *x.shape[3:])
            x = torch.cat((*state.waiting.pop(self.key, ()), x), 2)
        # Take as many rows at once as need no more memory than one frame.
        rows, y = max(x.shape[3] // max(x.shape[2], 1), 1), torch.empty_like(x)
        parts = list(zip(*(z.split(rows, 3) for z in (x, self.norm(x), y)), strict=True))
        for part, normed, out in parts[:: len(parts) - 1 or 1] if x.is_meta else parts:  # all need what the first does
            out.copy_(self._rows(part, normed))
        return y

    def _rows(self, x: Tensor, normed: Tensor) -> Tensor:
        b, c, t, h, w = x.shape
        tokens = normed.permute(0, 3, 4, 2, 1).reshape(b * h * w, t, c)
        q, k, v = (p.unflatten(2, (-1, self.head)).transpose(1, 2) for p in self.attn.qkv(tokens).chunk(3, 2))
        y = F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
        y = self.attn.out(y.transpose(1, 2).reshape(b * h * w, t, c))
        return x + y.unflatten(0, (b, h, w)).permute(0, 4, 3, 1, 2)


@dataclass(frozen=True)
class SpaceAttention(Attention):
    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: ConvAttention(self.width, self.norm)}


@dataclass(frozen=True)
class TimeAttention(Step):
    """Attention step. head: channels per head if it sees the whole clip; 0: it has one head, and sees earlier frames
    only."""

    name: str
    width: int
    norm: Norm
    head: int = 0
    in_place = True
    plain_only = "it has attention among the frames of a clip, which only plain torch does"

    def modules(self, style: Style) -> dict[str, nn.Module]:
        if self.head:
            return {self.name: WholeClip(self.width, self.norm, self.head)}
        return {self.name: EarlierFrames(self.width, self.norm)}

    @property
    def late(self) -> bool:  # type: ignore[override]
        return self.waits

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self.head > 0

    def taps(self, style: Style) -> Taps:
        return Taps(math.inf, math.inf if self.head else 0)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        positions, c = size.height * size.width, self.width
        flop = positions * (size.frames * 4 * 2.0 * c * c + 4.0 * size.frames**2 * c)
        return Work(flop, flop)
