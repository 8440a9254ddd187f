"""Execute an upsampler and the block after it as one: the tensor between them, four times the pixels of the input, is
made row by row and never stored whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.conv3d import Geometry
from ..runtime.arena import ALIGN
from ..runtime.context import ExecutionContext
from ..runtime.rolling import Layer, rolled, rolls
from ..runtime.weights import Conv
from .program import Step
from .values import Result, Size


class Layered(Step):
    """A step on pictures that consists of 3x3 convolutions, one after the other."""

    def layers(self, packed: Any, groups: int) -> tuple[Layer, ...]:
        """Return the layers, given the group count of the norm after the step; empty if the step has more than
        these."""
        raise NotImplementedError

    def shortcut(self, packed: Any) -> Conv | None:
        """Return the 1x1 convolution on the shortcut around the layers; None: the shortcut is the identity, or
        absent."""
        return None


def layers_of_both(
    run: ExecutionContext, links: Sequence[tuple[Step, Any, int]], x: Tensor, between: Size
) -> tuple[Layer, ...]:
    """Return the layers of an upsampler and a block that are to be executed as one, else nothing.

    Args:
        links: each step with its packed weights and the group count of the norm after it.
        x: input of the upsampler.
        between: size of the upsampler's result.
    """
    if len(links) < 2 or not all(isinstance(step, Layered) for step, _, _ in links):
        return ()
    (up, *packed), (block, *_) = links
    if up.space != (2, 1) or block.space != (1, 1) or not (first := up.layers(*packed)):
        return ()
    made = block.channels(between.channels)
    # `through_both` writes the result from the front of its memory while x lies in the second half: x must fit there.
    fits = x.is_contiguous() and x.shape[3] <= 2 * made
    sizes = x.numel(), math.prod(between), math.prod(between[:3]) * made
    return first + block.layers(*links[1][1:]) if fits and rolls(run, x.shape[0], *sizes) else ()


def through_both(
    run: ExecutionContext, layers: tuple[Layer, ...], around: Conv | None, x: Tensor, size: Size,
    tops: tuple[int, int] | None,
) -> Result:  # fmt: skip
    """Execute an upsampler and a block on x.

    Args:
        around: convolution on the block's shortcut, if it has one.
        size: of the result.
        tops: where the arena's stacks begin, one of them with x, if x is in the arena: the result then takes the place
            of x, whose values are overwritten as soon as nothing reads them again.

    Returns:
        The result and its sums for the norm after the block.
    """
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
