"""Steps that decoder and encoder share."""

from __future__ import annotations

import functools

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
    """One after the other. `overwrite`: where they get narrower, they work inside x as far as they can. `measure` off
    leaves out the sums of the last result, for where no norm follows."""
    wide = x if overwrite else None
    for block in blocks:
        last = block is blocks[-1]
        x, sums = resnet(run, block, x, sums, groups, out=out, wide=wide, measure=measure or not last)
    return x, sums


def resnet(
    run: Run, block: Resnet, x: Tensor, sums: Partials | None, groups: int, *, out: Tensor | None = None,
    wide: Tensor | None = None, measure: bool = True,
) -> tuple[Tensor, Partials | None]:
    """x is overwritten by the result where the widths agree. Else the result is `out` or a new tensor of the open
    scope. In `wide`, which is x or of no other use than to hold x in its first channels, there is room for the result
    in the first channels and for what lies between the convolutions in the next ones, if they are so many."""
    d, h, w, c = x.shape
    k = block.out_channels
    inside = wide is not None and k <= min(c, ONE_TILE) and not k & (k - 1)
    beside = inside and 2 * k <= wide.shape[3]
    if block.shortcut is None:
        out = x
    elif inside:
        out = wide[..., :k]
    elif out is None:
        out = run.take(d, h, w, k)
    with run.arena.scope():
        inner = wide[..., k : 2 * k] if beside else run.take(d, h, w, k)
        # Beside the result, the first convolution overwrites what it and the shortcut read.
        shorten = None if block.shortcut is None else functools.partial(run.pointwise, block.shortcut, x, out)
        sums = run.conv(block.conv1, x, inner, block.norm1, sums, groups, free=shorten if beside else None)
        if shorten is not None and not beside:
            shorten()
        sums = run.conv(block.conv2, inner, out, block.norm2, sums, groups if measure else 0, residual=out)
    return out, sums
