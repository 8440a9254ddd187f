"""Norms followed by SiLU: over a frame, over a chunk of frames, over the channels of a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..program import Step
from ..state import State

#: Frames of a clip's first chunk and of all later ones over which statistics are taken; or "clip": all frames, or
#: "piece": those of a call, in Programs that fix them.
Chunk = tuple[int, int] | Literal["clip", "piece"]


class GroupNormAct(nn.GroupNorm):
    """GroupNorm over (channels of the group, H, W) of each frame, then SiLU unless `act` is off.

    chunk: statistics span several frames instead. A chunk is returned when it is complete, or when the clip ends;
    "clip" is for steps that see all of it at once, "piece" for those that see a whole piece at once.
    """

    def __init__(
        self, channels: int, groups: int, act: bool = True, eps: float = 1e-6, chunk: Chunk | None = None
    ) -> None:
        super().__init__(groups, channels, eps=eps)
        self.act, self.chunk = act, chunk
        if isinstance(chunk, tuple):
            self.key = ""  # of the frames that wait in the State

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if self.chunk in ("clip", "piece"):
            return self._activated(super().forward(x))
        if self.chunk is not None:
            return self._by_chunks(x, state)
        b, _, t, _, _ = x.shape
        if t == 0:
            return x
        y = super().forward(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (b, t)).transpose(1, 2)
        return self._activated(y)

    def _activated(self, y: Tensor) -> Tensor:
        if not self.act:
            return y
        return F.silu(y) if torch.is_grad_enabled() else F.silu(y, inplace=True)

    def _by_chunks(self, x: Tensor, state: State | None) -> Tensor:
        starts = state is None or self.key not in state.through
        if state is not None and self.key in state.histories:
            x = torch.cat((state.histories[self.key], x), 2)
        ready, parts = 0, []
        while ready < x.shape[2]:
            size = self.chunk[0] if starts else self.chunk[1]
            if ready + size > x.shape[2] and not (state is None or state.ending):
                break
            parts.append(self._activated(super().forward(x[:, :, ready : ready + size])))
            ready, starts = ready + size, False
        if state is not None:
            state.through |= set() if starts else {self.key}
            state.keep(self.key, x[:, :, ready:])
        return torch.cat(parts, 2) if parts else x[:, :, :0]


class LengthNormAct(nn.Module):
    """x / |x| * sqrt(C) * gamma over the C channels of each position (|x| at least 1e-12), then SiLU unless off.

    `axes`: trailing axes of size 1 of gamma, as in the files.
    """

    eps = 1e-12

    def __init__(self, channels: int, act: bool = True, axes: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * axes))
        self.act = act

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        # fp32 up to the one rounding at the end: in fp16 a dark position's 1 / |x| would be infinite.
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp_min(self.eps)
        y = (x / length).mul_(self.gamma.float().view(-1, 1, 1, 1) * self.gamma.shape[0] ** 0.5)
        return (F.silu(y, inplace=True) if self.act else y).to(x.dtype)


class MeanSquareNormAct(nn.Module):
    """x / sqrt(mean of x^2 + eps) over the channels of each position, without parameters; then `scale` and `shift`, if
    given, and SiLU unless off."""

    def __init__(self, eps: float, act: bool = True) -> None:
        super().__init__()
        self.eps, self.act = eps, act

    def forward(
        self, x: Tensor, state: State | None = None, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        """Execute the norm; `scale` and `shift` are [C] float32."""
        wide = x.float()
        y = wide * (wide.square().mean(1, keepdim=True) + self.eps).rsqrt()
        if scale is not None:
            y = y.mul_(scale.view(-1, 1, 1, 1)).add_(shift.view(-1, 1, 1, 1))
        return (F.silu(y) if self.act else y).to(x.dtype)


class Activation(nn.Module):
    """SiLU alone, for networks without norms."""

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        return F.silu(x)


@dataclass(frozen=True)
class Group:
    """Choice of GroupNormAct for a Program's norms: sums over groups of channels, of each frame or of a chunk of
    frames."""

    groups: int
    chunk: Chunk | None = None
    eps: float = 1e-6

    def module(self, channels: int, act: bool = True, axes: int = 3) -> GroupNormAct:
        return GroupNormAct(channels, self.groups, act, self.eps, self.chunk)

    @property
    def late(self) -> bool:
        """Return whether it waits for whole chunks."""
        return isinstance(self.chunk, tuple)

    @property
    def whole(self) -> bool:
        """Return whether it must see the whole clip at once."""
        return self.chunk == "clip"


@dataclass(frozen=True)
class Length:
    """Choice of LengthNormAct: the root mean square of all channels of a position."""

    groups = 0
    late = whole = False

    def module(self, channels: int, act: bool = True, axes: int = 3) -> LengthNormAct:
        return LengthNormAct(channels, act, axes)


@dataclass(frozen=True)
class MeanSquare:
    """Choice of MeanSquareNormAct: as Length, without parameters."""

    eps: float
    groups = 0
    late = whole = False

    def module(self, channels: int, act: bool = True, axes: int = 3) -> MeanSquareNormAct:
        return MeanSquareNormAct(self.eps, act)


@dataclass(frozen=True)
class NoNorm:
    """Choice of Activation: SiLU alone."""

    groups = 0
    late = whole = False

    def module(self, channels: int, act: bool = True, axes: int = 3) -> Activation:
        return Activation()


Norm = Group | Length | MeanSquare | NoNorm


class Normed(Step):
    """A step that begins with its norm."""

    norm: Norm

    @property
    def groups(self) -> int:  # type: ignore[override]
        return self.norm.groups

    @property
    def late(self) -> bool:  # type: ignore[override]
        return self.norm.late

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self.norm.whole
