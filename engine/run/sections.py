"""Places of a clip's chunks in time."""

from __future__ import annotations

from collections.abc import Iterable

from .plan import Steps


def frames_of(latents: int, rate: int) -> int:
    """Return the number of frames of a clip's first `latents`, at `rate` frames for each but the first."""
    return max(0, rate * (latents - 1) + 1)


def latent_of(frame: int, rate: int) -> int:
    """Return the latent that a frame of a clip belongs to."""
    return -(-frame // rate)


def chunk_end(first: int, last: int, size: int, edges: Iterable[int]) -> int:
    """Return the end of a chunk of at most `size` latents from `first` on.

    It does not pass `last`, nor any of the `edges` with which steps begin."""
    return min(first + size, last, *(e for e in edges if e > first))


def with_chunks(begins: tuple[int, ...], steps: Steps | None, cycle: int) -> tuple[int, ...]:
    """Move the latents that steps begin with for a part of a clip back to where chunks of the whole begin.

    They are moved only if the first step begins with the clip. Chunks end where a step begins. A part that has to see
    the clip from its start would take more of them than the whole, and longer: now it takes those of the whole, each
    through as many steps or fewer.

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
