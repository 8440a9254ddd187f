"""Steps that decoder and encoder share."""

from __future__ import annotations

from torch import Tensor

from ..kernels.conv3d import Partials
from .run import Run
from .weights import Resnet


def resnets(
    run: Run, blocks: list[Resnet], x: Tensor, sums: Partials | None, groups: int, *, out: Tensor | None = None,
    measure: bool = True,
) -> tuple[Tensor, Partials | None]:
    """One after the other. `out` takes the result of the one that changes the width; `measure` off leaves out the
    sums of the last result, for where no norm follows."""
    for block in blocks:
        last = block is blocks[-1]
        x, sums = resnet(run, block, x, sums, groups, out=out, measure=measure or not last)
    return x, sums


def resnet(
    run: Run, block: Resnet, x: Tensor, sums: Partials | None, groups: int, *, out: Tensor | None = None,
    measure: bool = True,
) -> tuple[Tensor, Partials | None]:
    """x is overwritten by the result where the widths agree; else that is `out`, or a new tensor of the open scope."""
    d, h, w, _ = x.shape
    if block.shortcut is None:
        out = x
    else:
        out = run.take(d, h, w, block.out_channels) if out is None else out
        run.pointwise(block.shortcut, x, out)
    with run.arena.scope():
        inner = run.take(d, h, w, block.out_channels)
        sums = run.conv(block.conv1, x, inner, block.norm1, sums, groups)
        sums = run.conv(block.conv2, inner, out, block.norm2, sums, groups if measure else 0, residual=out)
    return out, sums
