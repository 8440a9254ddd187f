"""Parts of a clip in time, and the chunks that they go through a network in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Section(NamedTuple):
    """Latents [first, end) of a clip whose results are wanted. They are those of the whole clip, bit by bit: before
    `first`, each step sees as much of the clip as later ones need to get there."""

    clip: int
    first: int
    end: int


def frames_of(latents: int, rate: int) -> int:
    """Frames that a clip's first `latents` are, at `rate` for each but the first."""
    return max(0, rate * (latents - 1) + 1)


def chunks(first: int, end: int, size: int, edges: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Spans of at most `size` latents of [first, end), none of them across an edge."""
    marks = [first, *sorted({e for e in edges if first < e < end}), end]
    for a, b in itertools.pairwise(marks):
        yield from ((i, min(i + size, b)) for i in range(a, b, size))
