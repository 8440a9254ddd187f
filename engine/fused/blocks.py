"""Steps that decoder and encoder share."""

from __future__ import annotations

from torch import Tensor

from ..kernels.conv3d import Partials
from .run import Run
from .weights import Resnet

#: A 1x1x1 convolution to this many channels (or a smaller power of two) is one tile wide on every GPU: no program reads
#: what another one has written, so the result may take the place of the input.
ONE_TILE = 128


def resnets(
    run: Run, blocks: list[Resnet], x: Tensor, sums: Partials | None, groups: int, *, out: Tensor | None = None,
    overwrite: bool = False, measure: bool = True,
) -> tuple[Tensor, Partials | None]:
    """One after the other. `measure` off leaves out the sums of the last result, for where no norm follows."""
    for block in blocks:
        last = block is blocks[-1]
        x, sums = resnet(run, block, x, sums, groups, out=out, overwrite=overwrite, measure=measure or not last)
    return x, sums


def resnet(
    run: Run, block: Resnet, x: Tensor, sums: Partials | None, groups: int, *, out: Tensor | None = None,
    overwrite: bool = False, measure: bool = True,
) -> tuple[Tensor, Partials | None]:
    """x is overwritten by the result where the widths agree. Else the result is `out`, or with `overwrite` lies in x's
    first channels where it can, or is a new tensor of the open scope."""
    d, h, w, c = x.shape
    k = block.out_channels
    if block.shortcut is None:
        out = x
    elif overwrite and k <= min(c, ONE_TILE) and not k & (k - 1):
        out = x[..., :k]
    elif out is None:
        out = run.take(d, h, w, k)
    with run.arena.scope():
        inner = run.take(d, h, w, k)
        sums = run.conv(block.conv1, x, inner, block.norm1, sums, groups)
        if block.shortcut is not None:
            run.pointwise(block.shortcut, x, out)
        sums = run.conv(block.conv2, inner, out, block.norm2, sums, groups if measure else 0, residual=out)
    return out, sums
