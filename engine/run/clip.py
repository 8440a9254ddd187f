"""Clips through a half of a network, chunk by chunk or tile by tile: one loop, whatever computes the chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .guard import Guard
from .handover import Handover
from .pixels import PixelSink, StagedWriter
from .plan import Plan

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


class Pass(Protocol):
    """Takes clips or tiles of one size, one after the other, through a half of a network or a part of it."""

    gathers: Gathers

    def memory(self) -> AbstractContextManager[object]:
        """Whatever it needs is there inside."""

    def begin(self, clip: int, left: Handover | None) -> int:
        """A clip's start, or where an attempt before left it: how many of its latents are through."""

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

    @property
    def passes(self) -> int:
        """How often latents go through something: each tile, and what sees whole frames beside them."""
        return self.batch * (len(self.plan.grid) + 1 if self.plan.tiled else 1)

    def begin(self) -> bool:
        """An attempt's start; whether it has to start from nothing."""
        return self.guard.begin(self.plan.grid, self.latents, self.plan.steps.latents, self.passes)


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


def decode(half: Half, z: Tensor, plan: Plan, sink: PixelSink, guard: Guard) -> None:
    """Latents [B, C, T, h, w] into the sink's frames."""
    clips = Clips(z.shape[0], *z.shape[2:], sink.out.dtype, plan, guard)
    if clips.begin():
        sink.begin(plan.tiled)

    def cut(clip: int, first: int, end: int) -> Tensor:
        return z[clip, :, first:end]

    if not plan.tiled:
        most = plan.steps.frames or half.temporal * plan.steps.latents
        _whole(half, clips, cut, sink.out, most, functools.partial(_frames, half.temporal))
        return
    low, tile = half.low(clips), half.tile(clips)
    for clip in range(clips.batch):
        before = clip * clips.latents * (len(plan.grid) + 1)
        with low.memory():
            features = _features(half, low, clips, clip, functools.partial(cut, clip), before)
        with tile.memory():
            for index, where in enumerate(plan.grid.indices(), 1):
                if guard.finished[(clip, *where)] < sink.out.shape[1]:
                    _decode_tile(half, tile, clips, features, clip, where, sink, before + index * clips.latents)


def encode(half: Half, video: Tensor, plan: Plan, out: Tensor, guard: Guard) -> None:
    """Frames [B, F, H, W, 3] in 0..1 (or bytes) into moments out [B, 2C, T, h, w]; frames that fill no latent are not
    read."""
    clips = Clips(video.shape[0], out.shape[2], *video.shape[2:4], out.dtype, plan, guard)
    clips.begin()
    out = out.permute(0, 2, 3, 4, 1)

    def cut(clip: int, first: int, end: int) -> Tensor:
        return video[clip, _frames(half.temporal, first) : _frames(half.temporal, end)]

    if not plan.tiled:
        _whole(half, clips, cut, out, plan.steps.latents, int)
        return
    low, tile = half.low(clips), half.tile(clips)
    for clip in range(clips.batch):
        if guard.finished[clip] < clips.latents:
            before = clip * clips.latents * (len(plan.grid) + 1)
            with tile.memory():
                features = _blended(half, tile, clips, functools.partial(cut, clip), before)
            _low(half, low, clips, features, clip, out, before + clips.latents * len(plan.grid))


# -- whole frames -----------------------------------------------------------------------------------------------------


def _whole(
    half: Half, clips: Clips, cut: Callable[[int, int, int], Tensor], out: Tensor, most: int, at: Callable[[int], int]
) -> None:
    """Into out [B, N, H, W, C], at most `most` of N at once; at(latents): how many of N so many latents make."""
    guard, whole = clips.guard, half.whole(clips)
    with whole.memory(), StagedWriter(out, most, guard.device, guard.finish, half.ahead) as writer:
        for clip in range(clips.batch):
            if guard.finished[clip] < out.shape[1]:
                done = whole.begin(clip, guard.taken_over(clip))
                first = 0 if whole.gathers == "last" else at(done)
                emit = _unfinished(guard, clip, first, functools.partial(writer.write, clip))
                _through(whole, clips, functools.partial(cut, clip), emit, clip * clips.latents, done)


# -- blended tiles ----------------------------------------------------------------------------------------------------


def _features(half: Half, low: Pass, clips: Clips, clip: int, cut: Cut, before: int) -> list[Tensor]:
    """A decoder's features of whole frames, in host memory, chunk by chunk."""
    features: list[Tensor] = []

    def keep(part: Tensor, health: Tensor) -> None:
        features.append(part.to("cpu", copy=True))
        through = sum(map(len, features))
        first, end = (_frames(half.temporal, n) for n in (through - len(part), through))
        clips.guard.inspect(clip, first, end - first, float(health))

    low.begin(clip, None)
    _through(low, clips, cut, keep, before)
    return features


def _decode_tile(
    half: Half, tile: Pass, clips: Clips, features: list[Tensor], clip: int, where: tuple[int, int], sink: PixelSink,
    before: int,
) -> None:
    guard, grid, s, size = clips.guard, clips.plan.grid, half.spatial, clips.plan.steps.latents
    (y0, y1), (x0, x1) = grid.rows.spans()[where[0]], grid.cols.spans()[where[1]]
    weight = (grid.rows.weights(where[0], s)[:, None] * grid.cols.weights(where[1], s)[None, :]).to(guard.device)
    part = (clip, *where)

    def add(first: int, pixels: Tensor, health: Tensor) -> None:
        guard.inspect(part, first, len(pixels), float(health))
        sink.add_pixels(clip, first, s * y0, s * x0, pixels, weight)
        guard.finish(part, first, len(pixels))

    def cut(first: int, end: int) -> Tensor:
        return features[first // size][:, y0:y1, x0:x1]

    tile.begin(clip, None)
    _through(tile, clips, cut, _unfinished(guard, part, 0, add), before)


def _blended(half: Half, tile: Pass, clips: Clips, cut: Cut, before: int) -> Tensor:
    """An encoder's features [T, h, w, C] of one clip, blended in host memory. The last tiles also take the pixels that
    fill no latent pixel, as whole frames do."""
    rows, cols, s = clips.plan.grid.rows, clips.plan.grid.cols, half.spatial
    features: list[Tensor] = []
    for index, (i, j) in enumerate(clips.plan.grid.indices()):
        (y0, y1), (x0, x1) = rows.spans()[i], cols.spans()[j]
        bottom = clips.height if y1 == rows.length else s * y1
        right = clips.width if x1 == cols.length else s * x1
        weight = (rows.weights(i)[:, None] * cols.weights(j)[None, :])[..., None].to(clips.guard.device)
        at = 0

        def add(part: Tensor, health: Tensor) -> None:
            nonlocal at
            if not features:
                size = part.shape[-1], clips.latents, rows.length, cols.length
                features.append(torch.zeros(size).permute(1, 2, 3, 0))
            features[0][at : at + len(part), y0:y1, x0:x1] += (part.float() * weight).cpu()  # noqa: B023
            at += len(part)

        def crop(first: int, end: int) -> Tensor:
            return cut(first, end)[:, s * y0 : bottom, s * x0 : right]  # noqa: B023

        tile.begin(0, None)
        _through(tile, clips, crop, add, before + index * clips.latents)
    return features[0]


def _low(half: Half, low: Pass, clips: Clips, features: Tensor, clip: int, out: Tensor, before: int) -> None:
    """An encoder's last part on whole frames, into out [B, T, h, w, 2C]."""
    guard = clips.guard
    with low.memory(), StagedWriter(out, clips.plan.steps.latents, guard.device, guard.finish, half.ahead) as writer:
        low.begin(clip, None)
        emit = _unfinished(guard, clip, 0, functools.partial(writer.write, clip))
        _through(low, clips, lambda first, end: features[first:end], emit, before)


# -- one part, chunk by chunk -----------------------------------------------------------------------------------------


def _through(run: Pass, clips: Clips, cut: Cut, emit: Emit, before: int, done: int = 0) -> None:
    """A clip or tile from its latent `done` on. before: latents of earlier parts, for the progress."""
    guard, spans = clips.guard, clips.plan.steps.spans(clips.latents, done)

    def parts() -> Iterator[Part]:
        for first, end in spans:
            guard.tick.check()
            yield Part(cut(first, clips.latents if run.gathers == "first" and first == 0 else end), first, end)

    for (_, end), _ in zip(spans, run.chunks(parts(), emit), strict=True):
        guard.reach(before + end)


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


def _frames(temporal: int, latents: int) -> int:
    """Frames that a clip's first `latents` make."""
    return max(0, temporal * (latents - 1) + 1)
