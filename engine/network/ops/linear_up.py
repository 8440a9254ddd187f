"""Upsampling by a linear layer of every position whose channels become samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ...kernels.conv3d import Partials, pack_weight
from ...operands.forms import Operands
from ...options import Options
from ...run.run import Run
from ...run.weights import Conv
from ..program import CAUSAL, Size, Step, Style, Work
from ..state import State
from .conv import Matrix, conv_work
from .depth import Stride, to_samples


@dataclass(frozen=True)
class LinearUp(Step):
    """A clip's first position has only the last of its frames. The layer's channels are those of `to_samples`."""

    name: str
    c_in: int
    c_out: int
    stride: Stride

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return self.stride[0], 1

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return self.stride[1], 1

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Matrix(self.c_in, self.c_out * math.prod(self.stride))}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        starts = state is None or state.count(self.name, x) == 0
        y = to_samples(part(self.name)(x), self.stride)
        return y[:, :, self.stride[0] - 1 :] if starts else y

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> tuple[Conv, Conv]:
        """(all frames of a position, only its last one)."""
        layer, dtype = part(self.name), operands.dtype
        frames, rows, columns = self.stride
        weight = layer.weight.float().view(self.c_out, frames, rows, columns, self.c_in)
        bias = layer.bias.float().view(self.c_out, frames, rows, columns)

        def of(first: int) -> Conv:
            count = frames - first
            order = weight[:, first:].permute(2, 3, 1, 0, 4).reshape(-1, self.c_in, 1, 1, 1)
            packed = pack_weight(order, dtype, (count, rows, columns))
            return Conv(layer.key, packed, bias[:, first:].permute(2, 3, 1, 0).reshape(-1).contiguous())

        return of(0), of(frames - 1)

    def run(self, packed: tuple[Conv, Conv], run: Run, x: Tensor, sums: Partials | None, out: Tensor | None,
            groups: int, first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        lead = int(first == 0)
        if lead:
            run.pointwise(packed[1], x[:1], out[:1])
        if x.shape[0] > lead:
            run.pointwise(packed[0], x[lead:], out[lead:])
        return out, None

    def channels(self, channels: int) -> int:
        return self.c_out

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out * math.prod(self.stride), 1)
