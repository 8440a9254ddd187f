"""Interfaces between a call and what runs a model, and between the clip loop and the passes that compute its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..network.program import Program
from ..network.steps import UNKNOWN, with_chunks
from ..planning.plan import Plan
from ..report import Report
from ..runtime.handover import Handover
from .guard import Guard
from .results import Results
from .reuse import Runs

#: emit(results [n, H, W, C], health) takes the next results of a part, which are valid until it returns. health:
#: float32 [], finite if all values that they were made of were.
Emit = Callable[[Tensor, Tensor], None]
#: cut(first, end) returns the input for latents [first, end) of a clip or tile: frames, features, or the latents.
Cut = Callable[[int, int], Tensor]


class Part(NamedTuple):
    """Input for the latents [first, end) of a clip."""

    data: Tensor
    first: int
    end: int


#: "first": the first part of a clip holds all of it. "last": all results come with the last part.
Gathers = Literal["", "first", "last"]


class Span(NamedTuple):
    """Latents [first, last) of a clip that go through a pass; last None: up to those that the wanted results take.

    index: of the pass among all passes. edges: latents at which steps, and so chunks, begin."""

    clip: int
    first: int
    last: int | None
    index: int
    edges: tuple[int, ...]


class Pass:
    """Takes clips or tiles of one size, one after the other, through a component or a part of it."""

    gathers: Gathers = ""
    #: Results are tensors of their own, which stay as they are.
    gives = False
    #: Most results that it gives at once; 0: those of a chunk's frames per step.
    at_once = 0

    def __init__(self, program: Program, steps: slice, guard: Guard) -> None:
        """Describe a pass through some steps of a program."""
        self._program, self._steps, self._guard = program, steps, guard

    def aside(self) -> AbstractContextManager[object]:
        """Enter the stream of its work, around everything else; between two chunks it may be left."""
        return nullcontext()

    def memory(self) -> AbstractContextManager[object]:
        """Hold its memory inside."""
        return nullcontext()

    def begins(self, first: int) -> tuple[int, ...]:
        """Return for each of its steps the first latent of a clip that it has to see for results from `first` on."""
        begins = self._begins(first)
        return begins[self._steps] or begins[:1]  # the tiles may have all the steps

    def _begins(self, first: int) -> tuple[int, ...]:
        return with_chunks(self._program.begins(first), self._guard.chunks, self._program.cycle)

    def begin(self, clip: int, first: int, left: Handover | None, corner: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Begin a clip for results from `first` on, or continue it where an earlier attempt left it.

        Args:
            clip: number of the clip.
            first: the first wanted result.
            left: state that an earlier attempt left; used up.
            corner: the first row and column of a tile, in pixels.

        Returns: how many of its latents are through or are not needed, and how many of its results are out. If all
        steps begin with one latent, as with a clip of their own, both count from there.
        """
        raise NotImplementedError

    def chunks(self, parts: Iterable[Part], emit: Emit) -> Iterator[None]:
        """Take each part through the network; yield after each."""
        raise NotImplementedError


@dataclass(frozen=True)
class Clips:
    """Input and output of a component in one call.

    height, width: of the input. dtype: of the results. first: the first wanted result. length: latents of a clip; end:
    the result after the last wanted one. Both return UNKNOWN until a stream of frames has ended. signed: a decoder's
    frames are in -1..1, not clamped."""

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
    signed: bool = False

    @property
    def latents(self) -> int:
        return self.length()

    def window(self, first: int, end: int) -> tuple[int, int]:
        """Return the latents [first, end) that suffice for these results."""
        return self.half.program.window(first, end, self.latents)

    def begin(self, results: Results) -> None:
        """Start an attempt."""
        if self.guard.begin(self.plan.grid, results.given):
            results.begin()
        if self.plan.tiled:
            self.guard.chunks = None
        spans = [self.window(self.first, self.end())]
        if self.plan.tiled and self.end() < UNKNOWN:
            spans = [self.window(a, b) for a, b in self._blocks(results)]
        latents = max((last - first for first, last in spans), default=1)
        passes = self.batch * len(spans) * self._passes
        self.guard.count(None if self.latents == UNKNOWN else latents, self.plan.steps.unit, passes)

    def unfinished(self, results: Results) -> Iterator[tuple[int, int, int, int]]:
        """Yield the unfinished blocks of results [a, b) of clips in tiles, in order, as (clip, passes before, a, b)."""
        index = 0
        for clip in range(self.batch):
            for first, end in self._blocks(results):
                if self.guard.finished[clip] < end:
                    yield clip, index, first, end
                index += self._passes

    @property
    def _passes(self) -> int:
        """Return the number of passes: one for each tile and one for the part on whole frames; 1 without tiles."""
        return len(self.plan.grid) + 1 if self.plan.tiled else 1

    def _blocks(self, results: Results) -> Iterator[tuple[int, int]]:
        first, size = self.guard.first, results.block or UNKNOWN
        while first < self.end():
            yield first, min(first + size, self.end())
            first += size


class Half(Protocol):
    """A component of a network, ready to run on a device.

    A decoder takes latents [C, n, h, w] and makes pixels, an encoder takes frames [f, H, W, 3] in 0..1 (or bytes) and
    makes moments; features between the part on whole frames and the part on tiles are [n, h, w, C]."""

    program: Program
    spatial: int
    temporal: int
    #: Results may be copied to the host while the next ones are made.
    ahead: bool

    def whole(self, clips: Clips) -> Pass:
        """Return the pass of the whole component on whole frames. A decoder's pixels have the output's type."""

    def low(self, clips: Clips) -> Pass:
        """Return the pass on whole frames that goes with tiles.

        It is a decoder's first part, which makes features, or an encoder's last."""

    def tile(self, clips: Clips) -> Pass:
        """Return the pass of the rest, on tiles. A decoder's pixels are float32 [m, H, W, 3], 0..1, not clamped."""


class Ready(Protocol):
    """An encoder or decoder, ready to run on a device."""

    def through(self, data: Any, plan: Plan, results: Results, guard: Guard, wanted: range) -> Iterator[int]:
        """Take latents [B, C, T, h, w], or the frames of an encode (`video.Video`), through the component.

        Args:
            data: of all clips.
            plan: that the component was made for.
            results: destination of the wanted frames, or moments, of each clip.
            guard: keeps count of what is finished.

        Yields: before each part of the work, the number of latents that it needs by then.
        """


class Component(Protocol):
    """Encoder and decoder of one model on one route: the fused operators, plain torch or a family's own, with the plans
    of planning/plans.py's class for that route.

    runs: its runs, where a plan is `kept`. A family's own one also has `begin`."""

    runs: Runs

    def half(self, name: str, plan: Plan, device: torch.device, scale: float, seed: int | None) -> Ready:
        """Return "encoder" or "decoder" for a run. scale: latents are divided by it. seed: of noise in a decoder."""

    def packed_bytes(self, half: str) -> int:
        """Return the bytes on the device of what it made of the weights of "encoder" or "decoder"."""

    def release(self, keep: str = "") -> int:
        """Free what it made of weights, except of the component `keep`; return their bytes."""

    def begin(self, report: Report, size: tuple[int, int, int], seed: int | None) -> None:
        """Note in the report what a decode begins with. size: latents and their rows and columns. seed: of noise."""
