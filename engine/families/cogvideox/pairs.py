"""Frame rates that are doubled and halved by copies and means of frames, without parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...network.program import Step
from ...network.state import State
from ...network.values import Result, Size, Sums
from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import ExecutionContext


class _Pairs(Step):
    """A step on pairs of frames; of an odd number of frames in a call the first one stays single."""

    name: str
    stream: ClassVar[bool] = True

    def modules(self, style: object) -> dict[str, nn.Module]:
        return {}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> None:
        return None


@dataclass(frozen=True)
class DoubledFrames(_Pairs):
    """Repeat every frame."""

    name: str
    time = (2, 1)

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        lead = x.shape[2] % 2
        return torch.cat((x[:, :, :lead], x[:, :, lead:].repeat_interleave(2, 2)), 2)

    def run(self, packed: None, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        if not run.dry:
            lead = x.shape[0] % 2
            out[:lead].copy_(x[:lead])
            out[lead:].unflatten(0, (-1, 2)).copy_(x[lead:, None])
        return out, None

    def size(self, size: Size, starts: bool) -> Size:
        return size._replace(frames=2 * size.frames - size.frames % 2)


@dataclass(frozen=True)
class MeanFrames(_Pairs):
    """Take the mean of the two frames of a pair."""

    name: str
    time = (1, 2)

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        lead = x.shape[2] % 2
        return torch.cat((x[:, :, :lead], x[:, :, lead:].unflatten(2, (-1, 2)).mean(3)), 2)

    def run(self, packed: None, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        if not run.dry:
            lead = x.shape[0] % 2
            out[:lead].copy_(x[:lead])
            torch.mean(x[lead:].unflatten(0, (-1, 2)), 1, out=out[lead:])
        return out, None

    def size(self, size: Size, starts: bool) -> Size:
        return size._replace(frames=-(-size.frames // 2))
