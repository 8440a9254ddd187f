"""Temporal streaming: the network's parts over a clip, a few latents and a few frames at a time.

Every schedule gives the same result as one call with the whole clip; how much goes through at once is memory only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .state import State

if TYPE_CHECKING:
    from .plain import Half


@dataclass(frozen=True)
class Steps:
    """Latents per chunk, and frames per call at the highest resolutions. 0: all there are."""

    latents: int = 0
    frames: int = 0


def split(x: Tensor, size: int) -> Iterable[Tensor]:
    """[B, C, T, H, W] in steps of `size` frames (0: all)."""
    return x.split(size or max(x.shape[2], 1), 2)


#: How steps are cut.
Split = Callable[[Tensor, int], Iterable[Tensor]]


def _until_the_end(half: Half, parts: Iterable[Tensor], state: State) -> Iterator[Tensor]:
    """The parts. In networks that look ahead, `state` knows when the last one is out: it sees the clip's end."""
    if not half.program.late:
        yield from parts
        return
    waiting = None
    for part in parts:
        if waiting is not None:
            yield waiting
        waiting = part
    if waiting is not None:
        state.ending = True
        yield waiting


def _until_its_end(parts: Iterable[Tensor], state: State) -> Iterator[Tensor]:
    """The parts of one chunk, of which only the last one may be the clip's."""
    if not state.ending:
        yield from parts
        return
    *before, last = parts
    state.ending = False
    yield from before
    state.ending = True
    yield last


def decode_features(decoder: Half, z: Iterable[Tensor], check: Callable[[], None]) -> Iterator[Tensor]:
    """Latent chunks [B, C, n, h, w] -> features at latent resolution, chunk by chunk."""
    state = State()
    for part in _until_the_end(decoder, z, state):
        check()
        yield decoder.low(part, state)


def decode_frames(
    decoder: Half, features: Iterable[Tensor], steps: Steps, check: Callable[[], None], parts: Split = split
) -> Iterator[list[Tensor]]:
    """Features of the whole frame or of one tile -> per chunk, the list of its frames [B, 3, f, H, W]."""
    state = State()
    for chunk in _until_the_end(decoder, features, state):
        x = decoder.mid(chunk, state)
        out = []
        for frames in _until_its_end(parts(x, steps.frames), state):
            check()
            out.append(decoder.high(frames, state))
        yield out


def encode_features(
    encoder: Half, video: Iterable[Tensor], steps: Steps, check: Callable[[], None], parts: Split = split
) -> Iterator[Tensor]:
    """Frame chunks [B, 3, f, H, W] (1 + 4n first, then 4n) -> features at latent resolution, chunk by chunk."""
    state = State()
    for part in _until_the_end(encoder, video, state):
        high = []
        for frames in _until_its_end(parts(part, steps.frames), state):
            check()
            high.append(encoder.high(frames, state))
        yield encoder.mid(torch.cat(high, 2) if len(high) > 1 else high.pop(), state)


def encode_moments(encoder: Half, features: Iterable[Tensor], check: Callable[[], None]) -> Iterator[Tensor]:
    """Features at latent resolution -> moments [B, 2 * latent, n, h, w], chunk by chunk."""
    state = State()
    for part in _until_the_end(encoder, features, state):
        check()
        yield encoder.low(part, state)


def frame_spans(frames: int, latents: int, temporal: int) -> list[tuple[int, int]]:
    """Frame ranges for chunks of `latents`: the first latent is one frame, every later one `temporal`.

    Trailing frames that fill no latent are left out; the network never reads them either.
    """
    count = (frames - 1) // temporal + 1
    edges = [*range(0, count, latents or count), count]
    first = [0 if e == 0 else (e - 1) * temporal + 1 for e in edges]
    return list(itertools.pairwise(first))
