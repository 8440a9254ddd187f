"""Places of a clip's chunks in time, and how many latents and frames go through the network at once."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

#: Number of latents while it is unknown.
UNKNOWN = sys.maxsize


class Latents(Protocol):
    """Latents [B, C, T, h, w]; an item is on the host or the device."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, place: tuple[int, slice, slice]) -> Tensor: ...


@dataclass(frozen=True)
class Steps:
    """Latents per chunk, and frames per call at the highest resolutions; 0: all of them.

    lead: latents of a clip's first chunk; 0: as many as of the others. pieces: the clip is one chunk, and progress is
    counted by pieces of `frames` results. passes: number of times that a clip goes through parts of the network, its
    frames waiting in host memory in between."""

    latents: int = 0
    frames: int = 0
    lead: int = 0
    pieces: bool = False
    passes: int = 1

    @property
    def unit(self) -> int:
        """Return the latents that progress is counted by."""
        return 1 if self.pieces else self.latents

    def at(self, latent: int) -> int:
        """Return the latents of the chunk that begins with this one."""
        return self.lead or self.latents if latent == 0 else self.latents

    def spans(self, latents: int) -> list[tuple[int, int]]:
        """Return (first, end) of the chunks of a clip."""
        edges = [0]
        while edges[-1] < latents:
            edges.append(min(edges[-1] + self.at(edges[-1]), latents))
        return list(itertools.pairwise(edges))


def frames_of(latents: int, rate: int) -> int:
    """Return the number of frames of a clip's first `latents`, at `rate` frames for each but the first."""
    return max(0, rate * (latents - 1) + 1)


def frame_at(latent: int, latents: int, frames: int, rate: int) -> int:
    """Return the first frame of a latent where `frames` become `latents`, all but the first of `rate` frames each."""
    return frames - rate * (latents - latent) if latent else 0


def latent_of(frame: int, rate: int) -> int:
    """Return the latent that a frame of a clip belongs to."""
    return -(-frame // rate)


def chunk_end(first: int, last: int, size: int, edges: Iterable[int]) -> int:
    """Return the end of a chunk of at most `size` latents from `first` on.

    It does not pass `last`, nor any of the `edges` with which steps begin."""
    return min(first + size, last, *(e for e in edges if e > first))


def with_chunks(begins: tuple[int, ...], steps: Steps | None, cycle: int) -> tuple[int, ...]:
    """Move the latents with which the steps of a part begin back to where chunks of the whole clip begin.

    This is done only if the first step begins with the clip. Without it, such a part would be cut into more chunks than
    the whole clip, because chunks also end where a step begins, and would take longer.

    Args:
        begins: for each step, its first latent.
        steps: of the plan; None to leave `begins` as they are.
        cycle: steps begin with multiples of so many latents only.
    """
    if steps is None or begins[0]:
        return begins
    edges = [0]
    while steps.latents and (end := edges[-1] + steps.at(edges[-1])) <= begins[-1]:
        edges.append(end)
    return tuple(max(e for e in edges if e <= begin and e % cycle == 0) for begin in begins)
