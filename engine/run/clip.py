"""Clips through a half of a network, chunk by chunk or tile by tile: one loop, whatever computes the chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .guard import Guard
from .handover import Handover
from .pixels import PixelSink, StagedWriter
from .plan import Plan
from .sections import Section, chunks, frames_of

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


class Pass(Protocol):
    """Takes clips or tiles of one size, one after the other, through a half of a network or a part of it."""

    def memory(self) -> AbstractContextManager[object]:
        """Whatever it needs is there inside."""

    def begins(self, first: int) -> tuple[int, ...]:
        """For each of its steps, the latent from which on it has to see a clip for results from latent `first` on."""

    def begin(self, section: Section, left: Handover | None) -> int:
        """A section's start, or where an attempt before left it: how many of the clip's latents are through."""

    def chunks(self, parts: Iterable[Part], emit: Emit) -> Iterator[None]:
        """Each part through the network; yields after each."""


@dataclass(frozen=True)
class Clips:
    """What a half is asked to take through. height, width: of what goes in. dtype: of the frames that come out."""

    batch: int
    latents: int
    height: int
    width: int
    dtype: torch.dtype
    plan: Plan
    guard: Guard
    #: Each clip once at most; empty: all of all clips.
    parts: tuple[Section, ...] = ()

    @property
    def sections(self) -> tuple[Section, ...]:
        return self.parts or tuple(Section(clip, 0, self.latents) for clip in range(self.batch))

    @property
    def passes(self) -> int:
        """How often latents go through something: each tile, and what sees whole frames beside them."""
        return len(self.plan.grid) + 1 if self.plan.tiled else 1

    def before(self, section: Section) -> int:
        """Latents of the sections in front of it, as often as they go through something."""
        earlier = self.sections[: self.sections.index(section)]
        return self.passes * sum(s.end - s.first for s in earlier)

    def after(self, section: Section) -> int:
        """Sections behind it."""
        return len(self.sections) - self.sections.index(section) - 1

    def begin(self, at: Callable[[int], int]) -> bool:
        """An attempt's start; whether it has to start from nothing. at(latents): how many results so many make."""
        lengths, chunk, guard = [s.end - s.first for s in self.sections], self.plan.steps.latents, self.guard
        count, latents = (len(lengths), lengths[0]) if len(set(lengths)) == 1 else (1, sum(lengths))
        fresh = guard.begin(self.plan.grid, latents, chunk, count * self.passes)
        if fresh:
            for section in self.sections:
                for part in (section.clip, *((section.clip, *where) for where in self.plan.grid.indices())):
                    guard.finished[part] = at(section.first)
        return fresh


class Half(Protocol):
    """A half of a network, ready to run on a device.

    A decoder takes latents [C, n, h, w] and makes pixels, an encoder takes frames [f, H, W, 3] in 0..1 (or bytes) and
    makes moments; features between what sees whole frames and what sees tiles are [n, h, w, C].
    """

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


def decode(
    half: Half, z: Tensor, plan: Plan, sink: PixelSink, guard: Guard, sections: tuple[Section, ...] = ()
) -> None:
    """Latents [B, C, T, h, w] into the sink's frames: those of the sections, or all."""
    at = functools.partial(frames_of, rate=half.temporal)
    clips = Clips(z.shape[0], *z.shape[2:], sink.out.dtype, plan, guard, sections)
    if clips.begin(at):
        sink.begin(plan.tiled)

    def cut(clip: int, first: int, end: int) -> Tensor:
        return z[clip, :, first:end]

    if not plan.tiled:
        _whole(half, clips, cut, sink.out, plan.steps.frames, at)
        return
    low, tile = half.low(clips), half.tile(clips)
    for section in clips.sections:
        with low.memory():
            features = _features(half, low, clips, section, functools.partial(cut, section.clip), tile)
        with tile.memory():
            for index, where in enumerate(plan.grid.indices(), 1):
                if guard.finished[(section.clip, *where)] < at(section.end):
                    _decode_tile(half, tile, clips, features, section, where, sink, index)


def encode(
    half: Half, video: Tensor, plan: Plan, out: Tensor, guard: Guard, sections: tuple[Section, ...] = ()
) -> None:
    """Frames [B, F, H, W, 3] in 0..1 (or bytes) into moments out [B, 2C, T, h, w], those of the sections or all; frames
    that fill no latent are not read."""
    clips = Clips(video.shape[0], out.shape[2], *video.shape[2:4], out.dtype, plan, guard, sections)
    clips.begin(int)
    out = out.permute(0, 2, 3, 4, 1)

    def cut(clip: int, first: int, end: int) -> Tensor:
        return video[clip, frames_of(first, half.temporal) : frames_of(end, half.temporal)]

    if not plan.tiled:
        _whole(half, clips, cut, out, plan.steps.latents, int)
        return
    low, tile = half.low(clips), half.tile(clips)
    for section in clips.sections:
        if guard.finished[section.clip] < section.end:
            with tile.memory():
                features = _blended(half, tile, clips, section, functools.partial(cut, section.clip), low)
            _low(half, low, clips, features, section, out)


# -- whole frames -----------------------------------------------------------------------------------------------------


def _whole(
    half: Half, clips: Clips, cut: Callable[[int, int, int], Tensor], out: Tensor, most: int, at: Callable[[int], int]
) -> None:
    """Into out [B, N, H, W, C], at most `most` of N at once; at(latents): how many of N so many latents make."""
    guard, whole = clips.guard, half.whole(clips)
    with whole.memory(), StagedWriter(out, most, guard.device, guard.finish, half.ahead) as writer:
        for section in clips.sections:
            clip = section.clip
            if guard.finished[clip] < at(section.end):
                done = whole.begin(section, guard.taken_over(clip))
                edges = whole.begins(section.first)
                emit = _unfinished(guard, clip, at(max(done, edges[-1])), functools.partial(writer.write, clip))
                _through(whole, clips, section, functools.partial(cut, clip), emit, 0, edges, done)


# -- blended tiles ----------------------------------------------------------------------------------------------------


def _features(half: Half, low: Pass, clips: Clips, section: Section, cut: Cut, tile: Pass) -> dict[int, Tensor]:
    """A decoder's features of whole frames, in host memory, chunk by chunk: by the first latent of each."""
    features: dict[int, Tensor] = {}
    edges = low.begins(section.first) + tile.begins(section.first)
    at = low.begins(section.first)[-1]

    def keep(part: Tensor, health: Tensor) -> None:
        nonlocal at
        if not len(part):
            return
        features[at] = part.to("cpu", copy=True)
        first, end = (frames_of(n, half.temporal) for n in (at, at + len(part)))
        clips.guard.inspect(section.clip, first, end - first, float(health))
        at += len(part)

    low.begin(section, None)
    _through(low, clips, section, cut, keep, 0, edges)
    return features


def _decode_tile(
    half: Half, tile: Pass, clips: Clips, features: dict[int, Tensor], section: Section, where: tuple[int, int],
    sink: PixelSink, index: int,
) -> None:
    """index: of the passes over the section's latents."""
    guard, grid, s, clip = clips.guard, clips.plan.grid, half.spatial, section.clip
    (y0, y1), (x0, x1) = grid.rows.spans()[where[0]], grid.cols.spans()[where[1]]
    weight = (grid.rows.weights(where[0], s)[:, None] * grid.cols.weights(where[1], s)[None, :]).to(guard.device)
    part = (clip, *where)

    def add(first: int, pixels: Tensor, health: Tensor) -> None:
        guard.inspect(part, first, len(pixels), float(health))
        sink.add_pixels(clip, first, s * y0, s * x0, pixels, weight)
        guard.finish(part, first, len(pixels))

    def cut(first: int, end: int) -> Tensor:
        return features[first][:, y0:y1, x0:x1]

    tile.begin(section, None)
    edges = tile.begins(section.first)
    emit = _unfinished(guard, part, frames_of(edges[-1], half.temporal), add)
    _through(tile, clips, section, cut, emit, index, edges)


def _blended(half: Half, tile: Pass, clips: Clips, section: Section, cut: Cut, low: Pass) -> Tensor:
    """An encoder's features [T, h, w, C] of one clip, blended in host memory. The last tiles also take the pixels that
    fill no latent pixel, as whole frames do."""
    rows, cols, s = clips.plan.grid.rows, clips.plan.grid.cols, half.spatial
    features: list[Tensor] = []
    edges = tile.begins(section.first) + low.begins(section.first)
    for index, (i, j) in enumerate(clips.plan.grid.indices()):
        (y0, y1), (x0, x1) = rows.spans()[i], cols.spans()[j]
        bottom = clips.height if y1 == rows.length else s * y1
        right = clips.width if x1 == cols.length else s * x1
        weight = (rows.weights(i)[:, None] * cols.weights(j)[None, :])[..., None].to(clips.guard.device)
        at = tile.begins(section.first)[-1]

        def add(part: Tensor, health: Tensor) -> None:
            nonlocal at
            if not features and len(part):
                size = part.shape[-1], clips.latents, rows.length, cols.length
                features.append(torch.zeros(size).permute(1, 2, 3, 0))
            if len(part):
                features[0][at : at + len(part), y0:y1, x0:x1] += (part.float() * weight).cpu()  # noqa: B023
            at += len(part)

        def crop(first: int, end: int) -> Tensor:
            return cut(first, end)[:, s * y0 : bottom, s * x0 : right]  # noqa: B023

        tile.begin(section, None)
        _through(tile, clips, section, crop, add, index, edges)
    return features[0]


def _low(half: Half, low: Pass, clips: Clips, features: Tensor, section: Section, out: Tensor) -> None:
    """An encoder's last part on whole frames, into out [B, T, h, w, 2C]."""
    guard, clip, edges = clips.guard, section.clip, low.begins(section.first)
    with low.memory(), StagedWriter(out, clips.plan.steps.latents, guard.device, guard.finish, half.ahead) as writer:
        low.begin(section, None)
        emit = _unfinished(guard, clip, edges[-1], functools.partial(writer.write, clip))
        _through(low, clips, section, lambda first, end: features[first:end], emit, len(clips.plan.grid), edges)


# -- one part, chunk by chunk -----------------------------------------------------------------------------------------


def _through(
    run: Pass, clips: Clips, section: Section, cut: Cut, emit: Emit, index: int, edges: tuple[int, ...],
    done: int = 0,
) -> None:  # fmt: skip
    """A section of a clip or tile from latent `done` on. index: of this pass over its latents, for the progress.
    edges: where steps begin, at which chunks end."""
    guard, size, (_, first, end) = clips.guard, clips.plan.steps.latents, section
    before = clips.before(section) + index * (end - first)
    spans = list(chunks(max(done, run.begins(first)[0]), end, size, (*edges, first)))

    def parts() -> Iterator[Part]:
        for a, b in spans:
            guard.tick.check()
            yield Part(cut(a, b), a, b)

    for (_, b), _ in zip(spans, run.chunks(parts(), emit), strict=True):
        if b > first:
            guard.reach(before + b - first)


def _unfinished(
    guard: Guard, part: object, first: int, deliver: Callable[[int, Tensor, Tensor], None]
) -> Emit:
    """Counts a part's results from `first` on and delivers those that no attempt before has finished."""

    def emit(results: Tensor, health: Tensor) -> None:
        nonlocal first
        at, count = first, results.shape[0]
        first += count
        done = guard.skip(part, at, count)
        if done < count:
            deliver(at + done, results[done:], health)
        guard.tick.check()

    return emit
