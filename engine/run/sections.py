"""Where chunks of a clip lie in time."""

from __future__ import annotations

from collections.abc import Iterable


def frames_of(latents: int, rate: int) -> int:
    """Frames that a clip's first `latents` are, at `rate` for each but the first."""
    return max(0, rate * (latents - 1) + 1)


def latent_of(frame: int, rate: int) -> int:
    """The latent that a frame of a clip is of."""
    return -(-frame // rate)


def chunk_end(first: int, last: int, size: int, edges: Iterable[int]) -> int:
    """Of a chunk of at most `size` latents that begins with `first`: not behind `last`, and across none of the edges,
    with which steps begin."""
    return min(first + size, last, *(e for e in edges if e > first))
