"""Programs whose clips consist of sections in time, in which all latents are made of frames of their own."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .program import Program
from .sections import Sections
from .steps import frames_of, latent_of


@dataclass(frozen=True)
class Sectioned(Program):
    """A Program of a network without tiles of its own, whose clips go through in `sections`: an encoder of sections of
    several latents begins anew with each."""

    sections: Sections = field(default_factory=Sections)

    def frames(self, count: int) -> int:
        return self.sections.decoded(count) if self.half == "decoder" else self.sections.encoded(count)

    def encoded(self, frames: int) -> int:
        return self.sections.encoded(frames)

    def cut(self, read: Callable[[int, int], Tensor], first: int, end: int, origin: int, count: int | None) -> Tensor:
        start, stop = map(self.sections.at, (first, end))
        # A section's frames may end with those of its first latent.
        return filled(read(start if count is None else min(start, count - 1), stop), 0, stop - start)

    def warm_up(self, result: int, first: int) -> int:
        return latent_at(self, result, self.rates[-1]) - first

    def whole(self, x: Tensor) -> Tensor:
        """Return a clip [B, C, T, H, W] with as many frames as its latents are made of: the last one is repeated."""
        return filled(x, 2, self.sections.at(self.sections.encoded(x.shape[2])))

    def spans_of(self, latents: int, chunk: int) -> list[tuple[int, int]]:
        """Return the frame ranges of an encoder's chunks of so many latents (0: all), up to `latents`."""
        edges = [*range(0, latents, chunk or latents), latents]
        return list(itertools.pairwise(map(self.sections.at, edges)))

    @functools.cached_property
    def cycle(self) -> int:
        return self.sections.latents

    def begins(self, first: int) -> tuple[int, ...]:
        if self.sections.latents == 1:
            return super().begins(first)
        latent = first if self.half == "encoder" else self.sections.latent_of(first) - math.ceil(self.reach[0])
        return (max(0, latent) // self.cycle * self.cycle,) * len(self.steps)

    def window(self, first: int, end: int, latents: int) -> tuple[int, int]:
        last = end if self.half == "encoder" else self.sections.latent_of(end - 1) + 1
        return min(self.begins(first)[0], latents - 1), min(last, latents)


def latent_at(program: Program, result: int, rate: int) -> int:
    """Return the latent that a result of a clip belongs to; rate: results for each latent but the first."""
    if isinstance(program, Sectioned) and program.half == "decoder":
        return program.sections.latent_of(result)
    return latent_of(result, rate)


def results_before(program: Program, latent: int, rate: int) -> int:
    """Return the number of results of a clip before those of a latent; arguments as of `latent_at`."""
    if isinstance(program, Sectioned) and program.half == "decoder":
        return program.sections.at(latent)
    return frames_of(latent, rate)


def filled(x: Tensor, axis: int, count: int) -> Tensor:
    """Return the first `count` frames of x, the last one repeated where it has fewer; axis: of frames."""
    missing = count - x.shape[axis]
    if missing <= 0:
        return x.narrow(axis, 0, count)
    last = x.narrow(axis, x.shape[axis] - 1, 1)
    return torch.cat((x, *(last,) * missing), axis)
