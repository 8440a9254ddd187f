"""Attention among the frames of every position, with a residual: all frames of a clip, or those up to its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..program import CAUSAL, Size, Step, Style, Taps, Work
from ..state import State
from ..tree import find, graft
from .attention import Attention, FrameAttention
from .conv import ClipConv
from .norm import Norm

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
    plain_only = "it has attention among the frames of a clip, which only the plain walk does"

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
