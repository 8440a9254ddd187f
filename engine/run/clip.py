"""Clips through a half of a network, chunk by chunk or tile by tile: one loop, whatever computes the chunks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .guard import Guard
from .handover import Handover
from .pixels import StagedWriter
from .plan import Plan
from .results import Results
from .within import within

#: Of latents, while nobody knows their number.
UNKNOWN = sys.maxsize
#: emit(results [n, H, W, C], health): the next ones of a part, valid until it returns. health: float32 [], finite if
#: all values behind them were.
Emit = Callable[[Tensor, Tensor], None]
#: cut(first, end): of a clip or tile what becomes its latents [first, end), or comes of them.
Cut = Callable[[int, int], Tensor]


class Part(NamedTuple):
    """What goes in for the latents [first, end) of a clip."""

    data: Tensor
    first: int
    end: int


#: The first part of a clip holds all of it, or with its last part all results come.
Gathers = Literal["", "first", "last"]


class Span(NamedTuple):
    """Latents [first, last) of a clip that a pass takes through; last None: up to those that the wanted results take.
    index: of the pass among all passes."""

    first: int
    last: int | None
    index: int


class Latents(Protocol):
    """Latents [B, C, T, h, w], on the host or the device once they are asked for."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, place: tuple[int, slice, slice]) -> Tensor: ...


class Video(Protocol):
    """Frames of clips of one size. count: of each clip; None: not known yet."""

    batch: int
    height: int
    width: int
    count: int | None

    def frames(self, clip: int, first: int, end: int) -> Tensor:
        """[first, end), or as many of them as there are: [f, H, W, 3] in 0..1, or bytes."""


class Pass(Protocol):
    """Takes clips or tiles of one size, one after the other, through a half of a network or a part of it."""

    gathers: Gathers

    def aside(self) -> AbstractContextManager[object]:
        """Where its work is queued; around everything else, between two chunks it may be left."""

    def memory(self) -> AbstractContextManager[object]:
        """Whatever it needs is there inside."""

    def begin(self, clip: int, left: Handover | None) -> tuple[int, int]:
        """A clip's start, or where an attempt before left it: how many of its latents are through, and how many of its
        results are out."""

    def chunks(self, parts: Iterable[Part], emit: Emit) -> Iterator[None]:
        """Each part through the network; yields after each."""


@dataclass(frozen=True)
class Clips:
    """What a half is asked to take through. height, width: of what goes in. dtype: of the results that come out.

    first: the first result that is wanted. length: latents of a clip; end: the result behind the last wanted one. Both
    are UNKNOWN until a stream of frames has ended.
    """

    half: Half
    batch: int
    height: int
    width: int
    dtype: torch.dtype
    plan: Plan
    guard: Guard
    first: int
    length: Callable[[], int]
    end: Callable[[], int]

    @property
    def latents(self) -> int:
        return self.length()

    def window(self, first: int, end: int) -> tuple[int, int]:
        """The latents that are enough for these results."""
        return self.half.program.window(first, end, self.latents)

    def begin(self, results: Results) -> None:
        """An attempt's start."""
        if self.guard.begin(self.plan.grid, results.given):
            results.begin()
        spans = [self.window(self.first, self.end())]
        if self.plan.tiled and self.end() < UNKNOWN:
            spans = [self.window(a, b) for a, b in self._blocks(results)]
        latents = max((last - first for first, last in spans), default=1)
        passes = self.batch * len(spans) * self._passes
        self.guard.count(None if self.latents == UNKNOWN else latents, self.plan.steps.latents, passes)

    def unfinished(self, results: Results) -> Iterator[tuple[int, int, int, int]]:
        """Of clips in tiles the blocks of results [a, b) that come one after the other: (clip, passes before, a, b)."""
        index = 0
        for clip in range(self.batch):
            for first, end in self._blocks(results):
                if self.guard.finished[clip] < end:
                    yield clip, index, first, end
                index += self._passes

    @property
    def _passes(self) -> int:
        """How often latents go through something: each tile, and what sees whole frames beside them."""
        return len(self.plan.grid) + 1 if self.plan.tiled else 1

    def _blocks(self, results: Results) -> Iterator[tuple[int, int]]:
        first, size = self.guard.first, results.block or UNKNOWN
        while first < self.end():
            yield first, min(first + size, self.end())
            first += size


class Description(Protocol):
    """What a Program says of a half."""

    half: str
    #: All of a clip has to be there from the start.
    gathers: bool

    @property
    def late(self) -> bool:
        """Results come out after more has gone in than they are of, the last ones when the clip ends."""

    def window(self, first: int, end: int, latents: int) -> tuple[int, int]:
        """Of a clip of `latents` those that are enough for its results [first, end)."""


class Half(Protocol):
    """A half of a network, ready to run on a device.

    A decoder takes latents [C, n, h, w] and makes pixels, an encoder takes frames [f, H, W, 3] in 0..1 (or bytes) and
    makes moments; features between what sees whole frames and what sees tiles are [n, h, w, C].
    """

    program: Description
    spatial: int
    temporal: int
    #: Whether results may reach the host while the next ones are made.
    ahead: bool

    def whole(self, clips: Clips) -> Pass:
        """All of it, on whole frames. A decoder's pixels are those of the output."""

    def low(self, clips: Clips) -> Pass:
        """What sees whole frames beside tiles: a decoder's first part, which makes features, an encoder's last."""

    def tile(self, clips: Clips) -> Pass:
        """The rest, on tiles. A decoder's pixels are float32 [m, H, W, 3], 0..1, not clamped."""


def decode(half: Half, z: Latents, plan: Plan, results: Results, guard: Guard, wanted: range) -> Iterator[int]:
    """Latents into the wanted frames of every clip. Yields before each chunk."""
    batch, _, latents, height, width = z.shape
    clips = Clips(half, batch, height, width, results.dtype, plan, guard, wanted.start, lambda: latents,
                  lambda: wanted.stop)  # fmt: skip
    clips.begin(results)

    def cut(clip: int, _: int, first: int, end: int) -> Tensor:
        return z[clip, :, first:end]

    if not plan.tiled:
        whole = half.whole(clips)
        most = plan.steps.frames or half.temporal * plan.steps.latents
        yield from within(whole.aside, _whole(half, whole, clips, cut, results, most))
        return
    low, tile = half.low(clips), half.tile(clips)
    for clip, index, first, end in clips.unfinished(results):
        part, features = Span(*clips.window(first, end), index), []
        results.open(clip, first, end - first)
        with low.memory():
            yield from _features(half, low, clips, clip, functools.partial(cut, clip, part.first), part, features)
        with tile.memory():
            for number, where in enumerate(plan.grid.indices(), 1):
                name, own = (clip, *where), part._replace(index=index + number)
                yield from _decode_tile(half, tile, clips, features, name, (first, end), own, results)
        results.close(clip, first)
        guard.finish(clip, first, end - first)


def encode(half: Half, video: Video, plan: Plan, results: Results, guard: Guard, wanted: range) -> Iterator[int]:
    """Frames into the wanted moments [n, h, w, 2C] of every clip; frames that fill no latent are not read.

    Yields before each chunk: of how many latents the frames have to be there by now, if there are so many.
    """

    def length() -> int:
        return UNKNOWN if video.count is None else (video.count - 1) // half.temporal + 1

    clips = Clips(half, video.batch, video.height, video.width, results.dtype, plan, guard, wanted.start, length,
                  lambda: min(wanted.stop, length()))  # fmt: skip
    clips.begin(results)

    def cut(clip: int, origin: int, first: int, end: int) -> Tensor:
        start = half.temporal * first if first == origin else _frames(half.temporal, first)
        return video.frames(clip, start, _frames(half.temporal, end))

    if not plan.tiled:
        whole = half.whole(clips)
        yield from within(whole.aside, _whole(half, whole, clips, cut, results, plan.steps.latents))
        return
    low, tile = half.low(clips), half.tile(clips)
    for clip, index, first, end in clips.unfinished(results):
        yield clips.window(first, end)[1]
        end = min(end, clips.end())
        if first < end:  # a stream of frames may have ended there
            part, features = Span(*clips.window(first, end), index), []
            with tile.memory():
                yield from _blended(half, tile, clips, functools.partial(cut, clip, part.first), part, features)
            part = part._replace(index=index + len(plan.grid))
            yield from _low(half, low, clips, features[0], clip, part, end, results)


# -- whole frames -----------------------------------------------------------------------------------------------------


def _whole(
    half: Half, whole: Pass, clips: Clips, cut: Callable[[int, int, int, int], Tensor], results: Results, most: int
) -> Iterator[int]:
    """At most `most` results at once. cut(clip, origin, first, end): as Cut, of a clip that begins at `origin`."""
    guard = clips.guard
    with whole.memory(), StagedWriter(results, most, guard.device, guard.finish, half.ahead) as writer:
        for clip in range(clips.batch):
            finished = guard.finished[clip]
            if finished < clips.end():
                left = guard.taken_over(clip)
                if left is None:
                    guard.origin, _ = clips.window(finished, clips.end())
                through, out = whole.begin(clip, left)
                done, place = guard.origin + through, _place(half, guard.origin) + out
                emit = _unfinished(guard, clip, place, clips.end, functools.partial(writer.write, clip))
                cut_clip = functools.partial(cut, clip, guard.origin)
                yield from _through(whole, clips, cut_clip, emit, Span(done, None, clip))


# -- blended tiles ----------------------------------------------------------------------------------------------------


def _features(
    half: Half, low: Pass, clips: Clips, clip: int, cut: Cut, part: Span, features: list[Tensor]
) -> Iterator[int]:
    """A decoder's features of whole frames, in host memory, chunk by chunk."""
    at = part.first

    def keep(some: Tensor, health: Tensor) -> None:
        nonlocal at
        features.append(some.to("cpu", copy=True))
        first, at = at, at + len(some)
        place, end = _frames(half.temporal, first), _frames(half.temporal, at)
        clips.guard.inspect(clip, place, end - place, float(health))

    low.begin(clip, None)
    yield from _through(low, clips, cut, keep, part)


def _decode_tile(
    half: Half, tile: Pass, clips: Clips, features: list[Tensor], name: tuple[int, int, int], block: tuple[int, int],
    part: Span, results: Results,
) -> Iterator[int]:
    """name: clip, row and column. Into a block of the clip's frames [a, b)."""
    guard, grid, s, size = clips.guard, clips.plan.grid, half.spatial, clips.plan.steps.latents
    clip, row, column = name
    start, end = block
    if guard.finished[name] >= end:
        return
    (y0, y1), (x0, x1) = grid.rows.spans()[row], grid.cols.spans()[column]
    weight = (grid.rows.weights(row, s)[:, None] * grid.cols.weights(column, s)[None, :]).to(guard.device)

    def add(first: int, pixels: Tensor, health: Tensor) -> None:
        guard.inspect(name, first, len(pixels), float(health))
        results.add(clip, start, first, s * y0, s * x0, pixels, weight)
        guard.finish(name, first, len(pixels))

    def cut(first: int, _: int) -> Tensor:
        return features[(first - part.first) // size][:, y0:y1, x0:x1]

    tile.begin(clip, None)
    emit = _unfinished(guard, name, _place(half, part.first), lambda: end, add)
    yield from _through(tile, clips, cut, emit, part)


def _blended(half: Half, tile: Pass, clips: Clips, cut: Cut, part: Span, features: list[Tensor]) -> Iterator[int]:
    """An encoder's features [n, h, w, C] of a part of a clip, blended in host memory: the one entry that `features`
    gets. The last tiles also take the pixels that fill no latent pixel, as whole frames do."""
    rows, cols, s = clips.plan.grid.rows, clips.plan.grid.cols, half.spatial
    for number, (i, j) in enumerate(clips.plan.grid.indices()):
        (y0, y1), (x0, x1) = rows.spans()[i], cols.spans()[j]
        bottom = clips.height if y1 == rows.length else s * y1
        right = clips.width if x1 == cols.length else s * x1
        weight = (rows.weights(i)[:, None] * cols.weights(j)[None, :])[..., None].to(clips.guard.device)
        at = 0

        def add(some: Tensor, health: Tensor) -> None:
            nonlocal at
            if not features:
                size = some.shape[-1], part.last - part.first, rows.length, cols.length
                features.append(torch.zeros(size).permute(1, 2, 3, 0))
            features[0][at : at + len(some), y0:y1, x0:x1] += (some.float() * weight).cpu()  # noqa: B023
            at += len(some)

        def crop(first: int, end: int) -> Tensor:
            return cut(first, end)[:, s * y0 : bottom, s * x0 : right]  # noqa: B023

        tile.begin(0, None)
        yield from _through(tile, clips, crop, add, part._replace(index=part.index + number))


def _low(
    half: Half, low: Pass, clips: Clips, features: Tensor, clip: int, part: Span, end: int, results: Results
) -> Iterator[int]:
    """An encoder's last part on whole frames, into results in front of `end`."""
    guard, size = clips.guard, clips.plan.steps.latents

    def cut(first: int, last: int) -> Tensor:
        return features[first - part.first : last - part.first]

    with low.memory(), StagedWriter(results, size, guard.device, guard.finish, half.ahead) as writer:
        low.begin(clip, None)
        emit = _unfinished(guard, clip, part.first, lambda: end, functools.partial(writer.write, clip))
        yield from _through(low, clips, cut, emit, part)


# -- one part, chunk by chunk -----------------------------------------------------------------------------------------


def _through(run: Pass, clips: Clips, cut: Cut, emit: Emit, part: Span) -> Iterator[int]:
    """A part of a clip or tile. Yields before each chunk: how many of the clip's latents it has to have by now."""
    guard, steps, done = clips.guard, clips.plan.steps, part.first
    ahead = steps.latents if clips.half.program.late else 0

    def last() -> int:
        return clips.window(clips.first, clips.end())[1] if part.last is None else part.last

    def parts() -> Iterator[Part]:
        first = part.first
        while first < last():
            guard.tick.check()
            end = min(first + steps.at(first), last())
            yield Part(cut(first, last() if run.gathers == "first" and first == 0 else end), first, end)
            first = end

    chunks = run.chunks(parts(), emit)
    while done < last():
        size = steps.at(done)
        yield last() if clips.half.program.gathers else done + size + ahead
        if next(chunks, chunks) is chunks:  # a stream of frames has ended there
            break
        done = min(done + size, last())
        guard.reach(part.index, done, last() - done)
    next(chunks, None)  # what follows the last chunk


def _unfinished(
    guard: Guard, part: object, first: int, end: Callable[[], int], deliver: Callable[[int, Tensor, Tensor], None]
) -> Emit:
    """Counts a part's results from `first` on and delivers those in front of `end` that no attempt before has
    finished."""

    def emit(results: Tensor, health: Tensor) -> None:
        nonlocal first
        at, count = first, results.shape[0]
        first += count
        done, wanted = guard.skip(part, at, count), min(count, end() - at)
        if done < wanted:
            deliver(at + done, results[done:wanted], health)
        guard.tick.check()

    return emit


def _place(half: Half, first: int) -> int:
    """Within the clip, of the first result of a part that begins with the latent `first`: in a part, too, the first
    latent stands for one frame, its last."""
    return first if half.program.half == "encoder" else half.temporal * first


def _frames(temporal: int, latents: int) -> int:
    """Frames that a clip's first `latents` make."""
    return max(0, temporal * (latents - 1) + 1)
