"""Transformer blocks in which every token attends to the tokens around it, over the frames of one clip in turn.

Frames pass through a row of stations; a station may keep frames until those after them have come. Frames travel in
groups that depend on their place in the clip alone, so no bit depends on how many frames a call brings.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.tokens import gated, normalised
from .block_weights import Weights
from .kernels.blocks import GROUP as IN_SCALE
from .kernels.blocks import Place, added, angles, feed_forward, gated_product, projected, turned
from .kernels.neighbourhood import Window, neighbourhood

EPS = 1e-6
#: Frames that pass a block together: in its attention they share most of their keys, and the products of fewer leave
#: more of a GPU's processors without work at their end.
GROUP = 4
#: Stands for the frames of a clip whose end is not known.
ENDLESS = 1 << 30
Kernel = tuple[int, int, int]


@dataclass(frozen=True)
class Frames:
    """Consecutive frames of a clip, tokens [n, H, W, C]; `ends` where the clip ends with them.

    context, noisy: what a diffusion decoder's blocks need besides, frame by frame. spare: frames at the end that do not
    belong to the clip.
    """

    tokens: Tensor
    ends: bool
    context: Tensor | None = None
    noisy: Tensor | None = None
    spare: int = 0

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def part(self, first: int, last: int) -> Frames:
        context, noisy = (None if t is None else t[first:last] for t in (self.context, self.noisy))
        return Frames(self.tokens[first:last], self.ends and last == len(self), context, noisy)

    @staticmethod
    def joined(parts: Sequence[Frames]) -> Frames:
        """Return these frames as one."""
        if len(parts) == 1:
            return parts[0]
        context, noisy = (
            None if ts[0] is None else torch.cat(ts) for ts in ([p.context for p in parts], [p.noisy for p in parts])
        )
        return Frames(torch.cat([p.tokens for p in parts]), parts[-1].ends, context, noisy)


class Station(Protocol):
    """One step through which a clip's frames pass."""

    def push(self, frames: Frames) -> Iterator[Frames]:
        """Take the clip's next frames and yield those that go on."""


def along(stations: Sequence[Station], frames: Frames) -> Iterator[Frames]:
    """Take frames through stations one after the other, each group as far as it gets before the next one."""
    if not stations:
        yield frames
        return
    for made in stations[0].push(frames):
        yield from along(stations[1:], made)


class Grouped:
    """Cut a clip's frames into groups, counted from its start; the last group may be smaller."""

    def __init__(self) -> None:
        self._waiting: list[Frames] = []

    def push(self, frames: Frames) -> Iterator[Frames]:
        for i in range(len(frames)):
            self._waiting.append(frames.part(i, i + 1))
            if len(self._waiting) == GROUP or self._waiting[-1].ends:
                group, self._waiting = Frames.joined(self._waiting), []  # parts keep the memory of all they came with
                yield group


class Dropped:
    """Drop the last `count` frames of a clip, for which it holds back the groups that may contain them.

    A group that also has other frames stays whole, so that products of groups keep their sizes; `spare` of the group
    says how many of its frames to leave out."""

    def __init__(self, count: int) -> None:
        self._count, self._held, self._waiting = count, 0, deque[Frames]()

    def push(self, frames: Frames) -> Iterator[Frames]:
        self._waiting.append(frames)
        self._held += len(frames)
        while self._held > self._count + (0 if frames.ends else len(self._waiting[0])):
            group = self._waiting.popleft()
            self._held -= len(group)
            last = self._held <= self._count
            yield replace(group, ends=last, spare=self._count - self._held if last else 0)


class Up:
    """Turn each token into samples by a linear layer; of a clip's first frame, only the last in time are kept. `most`
    frames come at once, if given: where results are large, memory that is as large as a group's is used again."""

    def __init__(self, linear: nn.Linear, stride: tuple[int, int, int], most: int = ENDLESS) -> None:
        samples, (_, c) = math.prod(stride), linear.weight.shape
        order = (linear.weight.view(-1, samples, c), linear.bias.view(-1, samples))  # samples are the inner channels
        self._weight, self._bias = (t.transpose(0, 1).flatten(0, 1) for t in order)
        self._stride, self._starts, self._most = stride, True, most

    def push(self, frames: Frames) -> Iterator[Frames]:
        (count, h, w, _), (pt, py, px) = frames.tokens.shape, self._stride
        for first in range(0, count - frames.spare, self._most):
            tokens = frames.tokens[first : first + self._most]
            n, last = len(tokens), min(first + self._most, count - frames.spare)
            made = F.linear(tokens, self._weight, self._bias).view(n, h, w, pt, py, px, -1)
            made = made.permute(0, 3, 1, 4, 2, 5, 6).reshape(n * pt, h * py, w * px, -1)
            drop, self._starts = (pt - 1) * self._starts, False
            yield Frames(made[drop : (last - first) * pt], frames.ends and last == count - frames.spare)
            del made  # before the next one is made


#: Rows whose products of the gate are in memory at once, in separate passes.
ROWS = 1 << 14


def in_groups(frames: int) -> int:
    """Return the frames of as many whole groups as hold these."""
    return -(-frames // GROUP) * GROUP


def slots(kernel: Kernel, early: bool = False) -> int:
    """Return the frames whose keys a block keeps: those of all windows of a group, or early ones."""
    return kernel[0] // 2 + GROUP + (waiting(kernel) if early else kernel[0] // 2)


def first(kernel: Kernel) -> int:
    """Return the frames that come to a block before its first group goes on."""
    return in_groups(max(GROUP - 1 - kernel[0] // 2, 0) + kernel[0])


def waiting(kernel: Kernel) -> int:
    """Return the frames that wait in a block once a group has gone on."""
    return in_groups(kernel[0] // 2)


class Attend:
    """A block. It keeps the keys and values of the last frames, and groups of frames that wait for later ones."""

    def __init__(
        self, weights: Callable[[], Weights], kernel: Kernel, after: nn.Linear | None = None, begins: int = 0,
        early: bool = False,
    ) -> None:  # fmt: skip
        """Prepare for a clip.

        Args:
            weights: called when the first frames come: a GPU has work by then, and does not wait for this.
            after: the product of the context that the next block adds to its input, if it does: this block adds it.
            begins: the clip's frame that comes first, where it is a part: its frames have their places in the clip.
            early: keys are made of whole groups, when they come: fewer products, and more memory.
        """
        self._slots, self._early = slots(kernel, early), early
        self._weights, self._kernel, self._after, self._begins = weights, kernel, after, begins
        self._keys: Tensor | None = None
        self._waiting: list[Frames] = []
        self._count = self._kept = self._first = 0  # frames that came, whose keys are kept, and that went on

    @functools.cached_property
    def _w(self) -> Weights:
        return self._weights()

    @functools.cached_property
    def _ones(self) -> Tensor:
        return torch.ones_like(self._w.norm2)

    @property
    def _width(self) -> int:
        return self._w.proj.shape[0]

    @property
    def _head(self) -> int:
        return self._w.norms.shape[1]

    def push(self, frames: Frames) -> Iterator[Frames]:
        if self._after is None and frames.noisy is None:  # nothing after this block needs it
            frames = replace(frames, context=None)
        self._waiting.append(frames)
        self._count += len(frames)
        window, half = self._kernel[0], self._kernel[0] // 2
        while self._waiting:
            last = self._first + len(self._waiting[0]) - 1
            end = max(last - half, 0) + window
            if not frames.ends and end > self._count:
                return
            self._keep(self._count if self._early else min(end, self._count))
            ready = self._waiting.pop(0)
            clip = self._count if frames.ends else ENDLESS
            self._finish(ready, Window(self._kernel, self._first, clip, self._begins))
            self._first += len(ready)
            if ready.ends:
                self._keys = None  # others may need the memory, and the last frames are still on their way
            yield ready

    def _keep(self, end: int) -> None:
        """Store the keys and values of the frames before `end` that have none yet."""
        first = self._first
        for tokens in (frames.tokens for frames in self._waiting):
            if self._keys is None:
                self._keys = tokens.new_empty(self._slots, *tokens.shape[1:3], 2 * self._width)
            while self._kept < min(end, first + len(tokens)):
                slot = self._kept % len(self._keys)
                n = min(end, first + len(tokens), self._kept + len(self._keys) - slot) - self._kept
                at = self._kept - first
                self._projected(tokens[at : at + n], self._kept, None, self._keys[slot : slot + n])
                self._kept += n
            first += len(tokens)

    def _finish(self, frames: Frames, window: Window) -> None:
        """Complete frames whose keys are all there, in place."""
        x, w, c = frames.tokens.view(-1, self._width), self._w, self._width
        query = torch.empty_like(frames.tokens)
        self._projected(frames.tokens, window.first, query, None)
        parts = tuple(t.unflatten(-1, (-1, self._head)) for t in (query, self._keys[..., :c], self._keys[..., c:]))
        neighbourhood(*parts, window, bound=w.bound, out=parts[0])
        mixed, after = query.view(-1, c), self._after
        context = None if after is None else frames.context.reshape(-1, c)
        if w.fused:
            biases = None if w.biases is None else w.biases[0]
            if w.fed:
                more = None if after is None else (context, after.weight, after.bias)
                feed_forward(x, w.gates[0], biases, EPS, w.down, (mixed, w.proj, w.proj_bias), more)
                return
            added(x, mixed, w.proj, w.proj_bias)
            del mixed, parts, query
            rows, columns = x.shape[0], w.down.shape[1]
            inner, of_gates, of_down, found = x.new_empty(rows, columns, dtype=w.down.dtype), None, None, None
            if w.scales is not None:
                _, of_gates, of_down = w.scales
                found = x.new_empty(rows, columns // IN_SCALE, dtype=torch.float32)
            gated_product(x, w.gates[0], biases, EPS, inner, columns=of_gates, scales=found)
            more = None if after is None else (context, after.weight)
            bias = None if after is None else after.bias
            added(x, inner, w.down, bias, more, columns=of_down, scales=found)
            return
        normed = torch.empty_like(x)
        mixed = F.linear(mixed, w.proj, w.proj_bias)
        normalised(x, w.norm2, EPS, normed, y=mixed, scale=self._ones)
        del mixed, parts, query
        for rows, own in zip(normed.split(ROWS), x.split(ROWS), strict=True):
            self._gated(rows, own)
        if after is not None:
            x.add_(F.linear(context, after.weight, after.bias))

    def _gated(self, normed: Tensor, x: Tensor) -> None:
        """Add the gated products of some rows, in separate passes."""
        w = self._w
        both, inner = (x.new_empty(len(x), n * w.down.shape[1]) for n in (2, 1))
        for i, (part, weight) in enumerate(zip(both.chunk(2, 1), w.gates, strict=True)):
            _product(normed, weight, part, None if w.biases is None else w.biases[i])
        gated(both, inner)
        del both
        x.addmm_(inner, w.down.t())

    def _projected(self, x: Tensor, first: int, query: Tensor | None, keys: Tensor | None) -> None:
        """Write the queries, or the keys and values, of frames from the part's frame `first` on."""
        (n, h, w, c), weights, first = x.shape, self._w, self._begins + first
        table = angles(1 << (max(first + n, h, w) - 1).bit_length(), self._head, x.device)
        flat, place, heads = x.view(-1, c), Place(first, h, w), (-1, c // self._head, self._head)
        if weights.fused:
            q, k = (None if t is None else t.view(-1, *more, *heads[1:]) for t, more in ((query, ()), (keys, (2,))))
            columns = None if weights.scales is None else weights.scales.qkv
            projected(flat, weights.qkv, weights.qkv_bias, weights.norms, table, place, EPS, q, k, columns=columns)
            return
        normed = torch.empty_like(flat)
        normalised(flat, weights.norm1, EPS, normed)
        out, rows, norm = (query, slice(c), 0) if keys is None else (keys, slice(c, None), 1)
        out = out.view(flat.shape[0], -1)
        torch.mm(normed, weights.qkv[rows].t(), out=out)
        own = slice(c) if keys is None else slice(c, 2 * c)
        turned(out[:, :c].unflatten(1, heads[1:]), weights.qkv_bias[own], weights.norms[norm], table, place, EPS)


def _product(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """Compute x [R, K] times weight [N, K], plus the bias, into out [R, N], which may have gaps between rows."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
