"""Linear layers on every position, which files store as matrices or as 1x1x1 convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...kernels.conv3d import Partials
from ...options import Options
from ...precision.forms import Operands
from ...runtime.run import Run
from ..program import CAUSAL, Size, Style, Work
from ..state import State
from ..tree import find, graft
from .conv import Between, ClipConv, Matrix, conv_work
from .ends import PackedLinear


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
        layer = self._layer(part)
        weight = layer.weight.float().flatten(1).t().contiguous()
        return PackedLinear(weight, weight.new_zeros(self.c_out) if layer.bias is None else layer.bias.float())

    def run(self, packed: PackedLinear, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        if not run.dry:  # frame by frame, so that the product does not depend on the chunk
            for source, target in zip(x, out, strict=True):
                flat = source.float().reshape(-1, self.c_in)
                target.view(-1, self.c_out).copy_(torch.addmm(packed.bias, flat, packed.weight))
        return out, None

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, 1)
