"""Execute packed steps one after the other on an ExecutionContext, each result placed where it costs the least
memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.conv3d import Partials
from ..options import Options
from ..precision.forms import Operands
from ..runtime.context import ExecutionContext
from .program import Step
from .rolling import layers_of_both, through_both
from .values import Result, Size, Sums

#: Positions of frames that go through together in networks that see whole clips between steps of single frames.
GROUP = 2 << 20


@dataclass(frozen=True)
class Link:
    """One step with its packed weights. `groups` is the group count of the norm that follows, which the step's sums are
    for (0: no such norm)."""

    step: Step
    packed: Any
    groups: int

    def __call__(self, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None) -> Result:
        first = run.done[self.step.name]
        run.done[self.step.name] += run.foresee(self.step.ahead(self.packed), x.shape[0], run.drains)[0]
        return self.step.run(self.packed, run, x, sums, out, self.groups, first)


def pack_chain(
    steps: Sequence[Step], part: Callable[[str], nn.Module], operands: Operands, options: Options
) -> tuple[Link, ...]:
    """Pack steps that follow each other, so that the sums of each result reach the norm that reads it. operands: with
    the scale of the first step."""
    behind, links = [*(s.groups for s in steps[1:]), 0], []
    for step, groups in zip(steps, behind, strict=True):
        links.append(Link(step, step.pack(part, operands, options), groups))
        operands = replace(operands, scale=operands.scale * step.space[0] // step.space[1])
    return tuple(links)


def sizes(run: ExecutionContext, links: Sequence[Link], size: Size) -> list[Size]:
    """Return the size of the first link's input and of every result."""
    out, drains = [size], run.drains
    for link in links:
        frames, drains = run.foresee(link.step.ahead(link.packed), out[-1].frames, drains)
        made = link.step.size(out[-1]._replace(frames=frames), run.done[link.step.name] == 0)
        out.append(made if frames else made._replace(frames=0))
    return out


def through(
    run: ExecutionContext, links: Sequence[Link], size: Size, source: Callable[[], Result], out: Tensor | None = None,
    keep: bool = False, ends: bool = False,
) -> Result:  # fmt: skip
    """Execute all links on the result of `source`.

    A result that is larger or smaller than its input is allocated first: the input is made above it and freed at once.

    Args:
        size: of the result of `source`.
        out: memory for the result; ignored where all links work in place.
        keep: allocate the result before everything else, so that everything else can be freed.
        ends: many such results follow each other; they alternate between the two ends of the arena.

    Returns:
        The result and its sums for the norm that follows.
    """
    if run.still or ends:
        tops = run.arena.tops
        result = _from_end_to_end(run, links, sizes(run, links, size), source, out)
        if ends:
            run.arena.clear(tops)
        return result
    return _through(run, links, sizes(run, links, size), source, out, keep)


def _from_end_to_end(
    run: ExecutionContext, links: Sequence[Link], shapes: list[Size], source: Callable[[], Result], out: Tensor | None
) -> Result:
    """Execute steps that follow each other only once, as those of pictures do: a result that is not made in place lies
    at the other end of the arena than its input, so that at most two results exist at a time."""
    tops, within = run.arena.tops, False
    last = max((i for i, link in enumerate(links) if not link.step.in_place), default=-1)
    x, sums = source()
    clip = any(link.step.waits for link in links)
    waiting = enumerate(zip(links, shapes[1:], strict=True))
    for i, (link, shape) in waiting:
        if clip and not link.step.waits:
            some = list(itertools.takewhile(lambda one: not one.step.waits, links[i:]))
            if (count := _together(run, shapes[i + len(some)])) < x.shape[0]:
                for _ in some[1:]:
                    next(waiting)
                x, sums = _in_groups(run, some, shapes[i : i + len(some) + 1], x, sums,
                                     out if i <= last < i + len(some) else None, tops, count)  # fmt: skip
                continue
        target, both = out if i == last else None, links[i : i + 2]
        if out is None and (layers := layers_of_both(run, [(k.step, k.packed, k.groups) for k in both], x, shape)):
            next(waiting)
            run.done.update({k.step.name: x.shape[0] for k in both})
            x, sums = through_both(run, layers, both[1].step.shortcut(both[1].packed), x, shapes[i + 2],
                                   tops if within else None)  # fmt: skip
            within = True
            continue
        if not link.step.in_place and not (link.step.inside and target is None):
            run.arena.turn(tops)
            within = target is None
            if target is None and link.step.below:
                target = take(run, link.step, shape)
        x, sums = link(run, x, sums, target)
    return x, sums


def _together(run: ExecutionContext, size: Size) -> int:
    """Return the frames that steps which see each by itself take at once, in a network that sees whole clips between
    them: as many as fill a GPU, or one where the plan spares memory."""
    return 1 if run.spares else max(GROUP // (size.height * size.width), 1)


def _in_groups(
    run: ExecutionContext, links: Sequence[Link], shapes: Sequence[Size], x: Tensor, sums: Sums,
    out: Tensor | None, tops: tuple[int, int], count: int,
) -> Result:  # fmt: skip
    """Execute steps that see each frame by itself on `count` frames at a time: only their last result exists for the
    whole clip, in x itself if all work in place.

    Args:
        shapes: sizes of x and of every result, for the whole clip.
        sums: of x, for the first norm.
        out: memory for the result; None to allocate it.
        tops: where the arena's stacks begin.
    """
    changed, made, parts = not all(link.step.in_place for link in links), x, []
    if changed:
        run.arena.turn(tops)
        made = take(run, links[-1].step, shapes[-1]) if out is None else out
    for first, end in run.walk.spans(x.shape[0], count):
        own = None if sums is None or run.walk.open else Partials(sums.data[first:end], sums.span)
        part, sizes = (x[first:end], own), [size._replace(frames=end - first) for size in shapes]
        with run.arena.scope():
            target = made[first:end] if changed else None
            parts.append(_from_end_to_end(run, links, sizes, lambda part=part: part, target)[1])
    if changed:
        run.arena.clear(tops)
    if run.walk.open:
        return made, run.walk.joined(parts, x.shape[0], min(count, x.shape[0]))
    return made, run.joined(parts, 0)


def _through(
    run: ExecutionContext, links: Sequence[Link], shapes: list[Size], source: Callable[[], Result],
    out: Tensor | None, keep: bool
) -> Result:
    at = max((i for i, link in enumerate(links) if not link.step.in_place), default=-1)
    if at < 0:
        x, sums = source()
    elif keep or out is not None or links[at].step.below:
        x = take(run, links[at].step, shapes[at + 1]) if out is None else out
        with run.arena.scope():
            y, sums = _through(run, links[:at], shapes, source, None, False)
            _, sums = links[at](run, y, sums, x)
    else:
        x, sums = _through(run, links[:at], shapes, source, None, False)
        x, sums = links[at](run, x, sums, None)
    for link in links[at + 1 :]:
        x, sums = link(run, x, sums, None)
    return x, sums


def take(run: ExecutionContext, step: Step, size: Size) -> Tensor:
    """Allocate the step's result. In networks that look ahead it is as large as in the middle of a clip: steps in place
    that follow may have more frames at the clip's end."""
    frames = run.planned(step.name, size.frames)
    return run.arena.take((frames, *size[1:]), torch.float32 if step.wide else run.dtype)[: size.frames]


def given(x: Tensor) -> Callable[[], Result]:
    """Return a source that yields the existing tensor `x`."""
    return lambda: (x, None)
