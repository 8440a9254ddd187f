"""Stream through time: execute the network's parts over a clip, a few latents and a few frames at a time.

Every schedule gives the same result as one call with the whole clip; the size of the pieces only changes memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .plain import Half
from .program import Program
from .sectioned import Sectioned
from .state import Place, State
from .steps import Steps


def split(x: Tensor, size: int) -> Iterable[Tensor]:
    """Return [B, C, T, H, W] in pieces of `size` frames (0: all)."""
    return x.split(size or max(x.shape[2], 1), 2)


#: Function that cuts a tensor into steps, such as `split`.
Split = Callable[[Tensor, int], Iterable[Tensor]]


def _until_the_end(half: Half, parts: Iterable[Tensor], state: State) -> Iterator[Tensor]:
    """Yield the parts; in networks that look ahead, set `state.ending` before the last part, which sees the clip's
    end."""
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
    """Yield the parts of one chunk; only the last part may be the clip's last."""
    if not state.ending:
        yield from parts
        return
    *before, last = parts
    state.ending = False
    yield from before
    state.ending = True
    yield last


def decode_features(
    decoder: Half, z: Iterable[Tensor], check: Callable[[], None], seed: int | None = None, place: Place | None = None
) -> Iterator[Tensor]:
    """Yield features at latent resolution for latent chunks [B, C, n, h, w], chunk by chunk; `seed` is that of noise
    within the network."""
    if decoder.program.gathers:
        parts = list(z)
        check()
        yield from decoder.low(torch.cat(parts, 2)).split([part.shape[2] for part in parts], 2)
        return
    state = State(seed, place)
    for part in _until_the_end(decoder, z, state):
        check()
        yield decoder.low(part, state)


def decode_frames(
    decoder: Half, features: Iterable[Tensor], steps: Steps, check: Callable[[], None], parts: Split = split,
    seed: int | None = None, place: Place | None = None, given: Any = None,
) -> Iterator[Iterator[Tensor]]:  # fmt: skip
    """Yield, for each chunk of features of the whole frame or of one tile, an iterator of its frames [B, 3, f, H, W];
    each iterator must be exhausted before the next chunk. given: as of `State`."""
    state = State(seed, place, given)
    for chunk in _until_the_end(decoder, features, state):
        yield _frames(decoder, chunk, steps, check, parts, state)


def _frames(
    decoder: Half, chunk: Tensor, steps: Steps, check: Callable[[], None], parts: Split, state: State
) -> Iterator[Tensor]:
    # Where convolutions look ahead, the last chunk also gives the frames that all of them held back.
    for features in _until_its_end(split(chunk, steps.latents), state):
        x = decoder.between(features, state)
        for frames in _until_its_end(parts(x, steps.frames), state):
            check()
            yield from decoder.each(frames, state)


def encode_features(
    encoder: Half, video: Iterable[Tensor], steps: Steps, check: Callable[[], None], parts: Split = split,
    place: Place | None = None,
) -> Iterator[Tensor]:
    """Yield features at latent resolution for frame chunks [B, 3, f, H, W] (1 + 4n first, then 4n), chunk by chunk."""
    state = State(place=place)
    for part in _until_the_end(encoder, video, state):
        high = []
        for frames in _until_its_end(parts(part, steps.frames), state):
            check()
            high.append(encoder.high(frames, state))
        yield encoder.between(torch.cat(high, 2) if len(high) > 1 else high.pop(), state)


def encode_moments(
    encoder: Half, features: Iterable[Tensor], check: Callable[[], None], place: Place | None = None
) -> Iterator[Tensor]:
    """Yield moments [B, 2 * latent, n, h, w] for features at latent resolution, chunk by chunk."""
    if encoder.program.gathers:
        parts = list(features)
        check()
        yield from encoder.low(torch.cat(parts, 2)).split([part.shape[2] for part in parts], 2)
        return
    state = State(place=place)
    for part in _until_the_end(encoder, features, state):
        check()
        yield encoder.low(part, state)


def frame_spans(frames: int, latents: int, temporal: int) -> list[tuple[int, int]]:
    """Return frame ranges for chunks of `latents`: the first latent is one frame, every later one `temporal`.

    Trailing frames that fill no latent are left out; the network never reads them either.
    """
    count = (frames - 1) // temporal + 1
    edges = [*range(0, count, latents or count), count]
    first = [0 if e == 0 else (e - 1) * temporal + 1 for e in edges]
    return list(itertools.pairwise(first))


def spans_of(program: Program, frames: int, latents: int) -> list[tuple[int, int]]:
    """Return the frame ranges of an encoder's chunks of `latents`: its own pieces where it has such."""
    if isinstance(program, Sectioned):
        return program.spans_of(program.frames(frames), latents)
    return program.spans(frames) if program.piece else frame_spans(frames, latents, program.rates[0])
