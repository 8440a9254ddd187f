"""Frames of pictures of which only some rows are in memory at a time.

Convolutions follow each other from the top of the frame to its bottom, and begin anew for each norm that has to see the
whole frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.conv3d import Geometry, Partials, padded_channels
from ..kernels.norm_act import Norm, Store, coefficients
from .context import COPY, ExecutionContext
from .memory import Visit
from .parking import BAND_ROWS
from .weights import Conv

#: Most rows of the frame that a convolution makes at once. The next convolution stays one block of sums later, so that
#: its own bands are whole blocks.
ROWS = 4 * BAND_ROWS
#: Rows that are read again with the next ones: that block, and one row for the border.
AGAIN = BAND_ROWS + 1


@dataclass(frozen=True)
class Layer:
    """A 3x3 convolution of a picture. norm: of its input; groups: of the norm after it (0: none)."""

    conv: Conv
    norm: Norm
    groups: int


class Window:
    """The latest rows of a picture [1, H, W, C]; row r is at `r - top`."""

    def __init__(self, run: ExecutionContext, height: int, width: int, channels: int) -> None:
        self._kept = AGAIN if height > ROWS else 0
        self._dry = run.dry
        self.data = run.take(1, self._kept + min(height, ROWS), width, channels)
        self.top, self.made = -self._kept, 0

    def more(self, count: int, needed: int) -> Tensor:
        """Return memory for the next `count` rows.

        Earlier rows from `needed` on, at most AGAIN, stay for reading again."""
        again = self.made - needed
        if again and not self._dry:
            first = needed - self.top
            self.data[:, self._kept - again : self._kept].copy_(self.data[:, first : first + again])
        self.top = self.made - self._kept
        self.made += count
        return self.data[:, self._kept : self._kept + count]


def rolls(run: ExecutionContext, frames: int, *streams: int) -> bool:
    """Check whether streams of so many values, which would exist at once, exceed the plan's memory for them."""
    room = run.parked.parking.streams
    return run.still and room is not None and frames == 1 and sum(streams) * run.dtype.itemsize > room


def rolled(
    run: ExecutionContext, x: Tensor, sums: Partials | None, layers: Sequence[Layer], out: Tensor,
    begin: Callable[[Tensor, int], None] | None = None,
) -> Partials | None:  # fmt: skip
    """Run a picture through all layers, row by row, and add the result to `out`; return its sums.

    Every layer is computed as often as norms follow it, and a last time; only x and `out` are as large as the frame.

    Args:
        run: memory of the clip.
        x: [1, H, W, C].
        sums: of x, for the first norm.
        layers: consecutive convolutions.
        out: [1, H', W', K], may be x.
        begin: called as begin(rows, first) with the first layer's results from row `first` on, before anything is added
            to these rows of `out`.
    """
    found = [run.coefficients_of(x, layers[0].norm, sums)]
    for count in range(1, len(layers)):
        sums, (height, width) = _walk(run, x, layers[:count], found, None, None)
        known = run.dry or layers[count].norm.kind != "group"
        found.append(None if known else run.attempt(
            coefficients, sums, layers[count].norm, height * width, health=run.health,
        ))  # fmt: skip
    run.done.update({layer.conv.key: x.shape[0] for layer in layers})
    return _walk(run, x, layers, found, out, begin)[0]


def _walk(
    run: ExecutionContext, x: Tensor, layers: Sequence[Layer], found: Sequence[Tensor | None], out: Tensor | None,
    begin: Callable[[Tensor, int], None] | None,
) -> tuple[Partials | None, tuple[int, int]]:  # fmt: skip
    """Run all layers once from top to bottom; return the sums of the results, and their rows and columns.

    out None: only the sums are wanted."""
    sizes = [x.shape[1:3]]
    for layer in layers:
        _, tall, wide = layer.conv.weight.phases
        sizes.append((sizes[-1][0] * tall, sizes[-1][1] * wide))
    (height, width), channels = sizes[-1], layers[-1].conv.weight.out_channels
    with run.arena.scope():
        windows = [Window(run, *size, layer.conv.weight.out_channels)
                   for layer, size in zip(layers[:-1], sizes[1:], strict=False)]  # fmt: skip
        spill = run.take(1, min(height, ROWS), width, channels) if out is None else None
        walk = _Walk(run, x, layers, sizes, found, windows, out, spill, begin)
        walk.make(0)
    if run.walk.open:
        weight = layers[-1].conv.weight
        whole = torch.empty(1, height, width, channels, device="meta", dtype=torch.float32)
        return run.walk.sums(whole, layers[-1].groups, weight.phases[1:], weight), (height, width)
    return run.joined(walk.parts), (height, width)


class _Walk:
    """Rows of all layers, from top to bottom.

    It is a class, because a local function that calls itself would refer to itself, and the frame's memory would stay
    until the next garbage collection."""

    def __init__(
        self, run: ExecutionContext, x: Tensor, layers: Sequence[Layer], sizes: Sequence[tuple[int, int]],
        found: Sequence[Tensor | None], windows: Sequence[Window], out: Tensor | None, spill: Tensor | None,
        begin: Callable[[Tensor, int], None] | None,
    ) -> None:  # fmt: skip
        self._run, self._x, self._layers, self._sizes, self._found = run, x, layers, sizes, found
        self._windows, self._out, self._spill, self._begin = windows, out, spill, begin
        self._done = [0] * len(layers)
        self.parts: list[Partials | None] = []

    def make(self, i: int) -> None:
        """Make all rows that layer i can make by now, and then those that the later layers can make of them."""
        layer, height, done, last = self._layers[i], self._sizes[i][0], self._done, len(self._layers) - 1
        before = self._windows[i - 1] if i else None
        there = before.made if before else height
        ready, factor = there if there == height else (there - 1) // BAND_ROWS * BAND_ROWS, _factor(layer)
        while done[i] < ready:
            first, end = done[i], min(done[i] + ROWS // factor, ready)
            done[i], count = end, factor * (end - first)
            source, top = (before.data, before.top) if before else (self._x, 0)
            if i < last:
                target = self._windows[i].more(count, max(done[i + 1] - 1, 0))
            elif self._out is None:
                target = self._spill[:, :count]
            else:
                target = self._out[:, factor * first : factor * end]
            added = target if i == last and self._out is not None else None
            some = _band(self._run, layer, source, top, (first, end, height), self._found[i], target, added)
            if self._begin is not None and i == 0:
                self._begin(target, factor * first)
            if i == last:
                self.parts.append(some)
            else:
                self.make(i + 1)


def _factor(layer: Layer) -> int:
    return layer.conv.weight.phases[1]


def _band(
    run: ExecutionContext, layer: Layer, x: Tensor, top: int, rows: tuple[int, int, int], coefs: Tensor | None,
    out: Tensor,
    residual: Tensor | None,
) -> Partials | None:  # fmt: skip
    """Convolve rows of a frame of which x holds the rows from `top` on. rows: (first, end, height of the frame)."""
    (first, end, height), conv, (width, c) = rows, layer.conv, x.shape[2:]
    a, b = max(first - 1, 0), min(end + 1, height)
    if run.dry:
        work = (end - first) * width * conv.weight.flops_per_position
        run.visits.setdefault(conv.key, Visit(conv.history)).work += run.walk.repeats * work
    with run.arena.scope():
        plane = end - first + 2, width + 2, padded_channels(c, conv.dtype)
        data = run.arena.take((1, *plane), conv.dtype)
        if run.dry:
            return None
        store = Store(layer.norm is not COPY, run.border, conv.scale, conv.gain)
        run.write(x[:, a - top : b - top], layer.norm, data, store, coefs, first=first - a)
        return run.product(conv, data, out, geometry=Geometry(first_row=first, frame_rows=height),
                           groups=layer.groups, residual=residual)  # fmt: skip
