"""Steps that decoder and encoder share."""

from __future__ import annotations

from torch import Tensor

from ..kernels.conv3d import Partials
from .run import Run
from .weights import Resnet


def resnets(
    run: Run, blocks: list[Resnet], x: Tensor, sums: Partials | None, groups: int
) -> tuple[Tensor, Partials | None]:
    for block in blocks:
        x, sums = resnet(run, block, x, sums, groups)
    return x, sums


def resnet(run: Run, block: Resnet, x: Tensor, sums: Partials | None, groups: int) -> tuple[Tensor, Partials | None]:
    """x is overwritten by the result where the widths agree; else the result is a new tensor of the open scope."""
    d, h, w, _ = x.shape
    out = x
    if block.shortcut is not None:
        out = run.take(d, h, w, block.out_channels)
        run.pointwise(block.shortcut, x, out)
    with run.arena.scope():
        inner = run.take(d, h, w, block.out_channels)
        ring, start = run.feed(block.conv1.key, 2, x, block.norm1, sums)
        sums = run.conv(block.conv1, ring, start, inner, groups)
        ring, start = run.feed(block.conv2.key, 2, inner, block.norm2, sums)
        sums = run.conv(block.conv2, ring, start, out, groups, residual=out)
    return out, sums
