"""What the clip loop and those who compute its chunks agree on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .guard import Guard
from .handover import Handover
from .plan import Plan
from .results import Results

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
    index: of the pass among all passes. edges: latents that steps begin with, and chunks too."""

    clip: int
    first: int
    last: int | None
    index: int
    edges: tuple[int, ...]


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

    def begins(self, first: int) -> tuple[int, ...]:
        """For each of its steps the latent from which on it has to see a clip for results from `first` on."""

    def begin(self, clip: int, first: int, left: Handover | None) -> tuple[int, int]:
        """What a clip's results from `first` on take, or where an attempt before left that: how many of its latents are
        through, or need not go, and how many of its results are out. Where steps all begin with one latent, as with a
        clip of their own, both count from there."""

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
        if self.plan.tiled:
            self.guard.chunks = None
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

    #: Latents with whose multiples its steps begin.
    cycle: int

    @property
    def staged(self) -> bool:
        """A part of a clip needs of each step only what later ones do, and keeps its place in the clip."""

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
