"""Upsampling by a linear layer on every position, whose channels become samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ...kernels.conv3d import Partials
from ...options import Options
from ...precision.forms import Operands
from ...runtime.run import Run
from ..program import CAUSAL, Size, Style, Work
from ..state import State
from .conv import Matrix, conv_work
from .depth import Packed, ToSamples, to_samples


@dataclass(frozen=True)
class LinearUp(ToSamples):
    """Upsampling step. A clip's first position gives only the last of its frames."""

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Matrix(self.c_in, self.c_out * math.prod(self.stride))}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        starts = state is None or state.count(self.name, x) == 0
        y = to_samples(part(self.name)(x), self.stride)
        return y[:, :, self.stride[0] - 1 :] if starts else y

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        return self.packed(part(self.name), operands.dtype)

    def run(self, packed: Packed, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        lead = int(first == 0)
        if lead:
            run.pointwise(packed.last, x[:1], out[:1])
        if x.shape[0] > lead:
            run.pointwise(packed.all, x[lead:], out[lead:])
        return out, None

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out * math.prod(self.stride), 1)
