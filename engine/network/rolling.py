"""An upsampler and the block behind it as one: what lies between them, four times the pixels of its input, is made row
by row and kept nowhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.conv3d import Geometry, Partials
from ..run.arena import ALIGN
from ..run.rolling import Layer, rolled, rolls
from ..run.run import Run
from ..run.weights import Conv
from .program import Size, Step


class Layered(Step):
    """A step of pictures that is 3x3 convolutions, one after the other."""

    def layers(self, packed: Any, groups: int) -> tuple[Layer, ...]:
        """groups: of the norm behind the step. Nothing where it is more than these."""
        raise NotImplementedError

    def shortcut(self, packed: Any) -> Conv | None:
        """A 1x1 convolution of what passes around them; None: that stays as it is, or nothing passes."""
        return None


def layers_of_both(run: Run, links: Sequence[tuple[Step, Any, int]], x: Tensor, between: Size) -> tuple[Layer, ...]:
    """The layers of an upsampler and a block (each with what it has packed, and the groups of the norm behind it) where
    they are to be walked as one; else nothing. x: what goes in; between: what the first one makes of it."""
    if len(links) < 2 or not all(isinstance(step, Layered) for step, _, _ in links):
        return ()
    (up, *packed), (block, *_) = links
    if up.space != (2, 1) or block.space != (1, 1) or not (first := up.layers(*packed)):
        return ()
    made = block.channels(between.channels)
    # The result is made from the front of memory of whose second half x is no more than all.
    fits = x.is_contiguous() and x.shape[3] <= 2 * made
    sizes = x.numel(), math.prod(between), math.prod(between[:3]) * made
    return first + block.layers(*links[1][1:]) if fits and rolls(run, x.shape[0], *sizes) else ()


def through_both(
    run: Run, layers: tuple[Layer, ...], around: Conv | None, x: Tensor, size: Size, tops: tuple[int, int] | None
) -> tuple[Tensor, Partials | None]:
    """x through an upsampler and a block, to the result of `size`. around: the block's shortcut. tops: where the
    arena's stacks begin, one of them with x, if it is in the arena: the result then takes its place, and what x has is
    overwritten as soon as nothing reads it again."""
    if tops is not None:
        run.arena.restart(tops)
    itemsize = run.dtype.itemsize
    memory = run.arena.take((math.prod(size) * itemsize + ALIGN,), torch.uint8)
    out = memory[:-ALIGN].view(run.dtype).view(size)
    if tops is not None and not run.dry and x.data_ptr() == out.data_ptr():
        behind = memory[-x.numel() * itemsize :].view(run.dtype).view(x.shape)
        x = behind.copy_(x)

    def begin(rows: Tensor, first: int) -> None:
        target = out[:, first : first + rows.shape[1]]
        if run.dry:
            return
        if around is None:
            target.copy_(rows)
        else:
            run.product(around, rows, target, geometry=Geometry(first_row=first, frame_rows=size.height))

    return out, rolled(run, x, None, layers, out, begin)
