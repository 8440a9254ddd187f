"""Stream through time: execute the network's parts over a clip, a few latents and a few frames at a time.

Every schedule gives the same result as one call with the whole clip; the size of the pieces only changes memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..run.devices import empty_device_cache, keeps_blocks
from ..run.guard import Guard
from ..run.handover import Handover
from ..run.passes import Clips, Emit, Part
from ..run.pixels import to_network, to_pixels
from ..run.plan import Steps
from ..run.sections import with_chunks
from .plain import Half
from .state import Place, State


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
    seed: int | None = None, place: Place | None = None,
) -> Iterator[Iterator[Tensor]]:
    """Yield, for each chunk of features of the whole frame or of one tile, an iterator of its frames [B, 3, f, H, W];
    each iterator must be exhausted before the next chunk."""
    state = State(seed, place)
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


class PlainPass:
    """A Pass of run/clip.py: clips or tiles of one size, one by one. It allocates no memory of its own."""

    gathers = ""

    def __init__(
        self, half: Half, steps: slice, load: Callable[[Tensor], Tensor],
        network: Callable[[Iterator[Tensor], Place | None], Iterator[Iterable[Tensor]]],
        form: Callable[[Tensor], Tensor], guard: Guard,
    ) -> None:  # fmt: skip
        """Bind the callables of one pass.

        Args:
            steps: the steps of the Program that this pass executes.
            load: turns a part's data into [1, C, n, h, w].
            network: executes these, chunk by chunk, and gives results of that layout.
            form: turns results into those that are emitted; may overwrite its argument.
        """
        self._program, self._steps, self._guard = half.program, steps, guard
        self._load, self._network, self._form = load, network, form

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    memory = aside

    def begins(self, first: int) -> tuple[int, ...]:
        begins = self._begins(first)
        return begins[self._steps] or begins[:1]  # the tiles may have all the steps

    def _begins(self, first: int) -> tuple[int, ...]:
        return with_chunks(self._program.begins(first), self._guard.chunks, self._program.cycle)

    def begin(self, clip: int, first: int, left: Handover | None) -> tuple[int, int]:
        """Start the clip or part. Histories in `left` are ignored: those of another kind of pass do not fit."""
        # Plans have every clip and tile begin with an empty cache. In blocks that the tile before had cut, two tiles of
        # SeedVR2 reserved 13.5 GB where 11.6 were planned (H200).
        if keeps_blocks(self._guard.device):
            empty_device_cache()
        if not self._program.staged:
            self._place = None
            return 0, 0
        names, begins = (step.name for step in self._program.steps), self._begins(first)
        self._place = Place(dict(zip(names, begins, strict=True)))
        return begins[self._steps][0], 0

    def chunks(self, parts: Iterable[Part], emit: Emit) -> Iterator[None]:
        for pieces in self._network(self._loaded(parts), self._place):
            for piece in pieces:
                health = piece.sum(dtype=torch.float32)
                emit(self._form(piece), health)
                del piece  # before the next one is made
            yield

    def _loaded(self, parts: Iterable[Part]) -> Iterator[Tensor]:
        for part in parts:
            if self._place is not None:
                self._place.at = part.first
            yield self._load(part.data)


class PlainHalf:
    """A component (encoder or decoder) that executes clips eagerly (run/clip.py)."""

    ahead = False

    def __init__(
        self, half: Half, spatial: int, temporal: int, scale: float, dtype: torch.dtype, device: torch.device,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self.program, self.spatial, self.temporal = half.program, spatial, temporal
        self._decode_features = functools.partial(decode_features, seed=seed)
        self._decode_frames = functools.partial(decode_frames, seed=seed)
        self._half, self._scale, self._dtype, self._device = half, scale, dtype, device

    def whole(self, clips: Clips) -> PlainPass:
        half, steps, check, every = self._half, clips.plan.steps, clips.guard.tick.check, slice(None)
        features, frames = self._decode_features, self._decode_frames
        if half.program.half == "decoder":

            def decode(parts: Iterator[Tensor], place: Place | None) -> Iterator[Iterator[Tensor]]:
                return frames(half, features(half, parts, check, place=place), steps, check, place=place)

            return PlainPass(half, every, self._latents, decode, lambda piece: to_pixels(piece, clips.dtype)[0],
                             clips.guard)  # fmt: skip

        def encode(parts: Iterator[Tensor], place: Place | None) -> Iterator[tuple[Tensor]]:
            features = encode_features(half, parts, steps, check, place=place)
            return _each(encode_moments(half, features, check, place))

        return PlainPass(half, every, self._video, encode, _last, clips.guard)

    def low(self, clips: Clips) -> PlainPass:
        half, check = self._half, clips.guard.tick.check
        if half.program.half == "decoder":
            return PlainPass(
                half, slice(half.front), self._latents,
                lambda parts, place: _each(self._decode_features(half, parts, check, place=place)), _last, clips.guard,
            )  # fmt: skip
        return PlainPass(
            half, slice(half.front, None), self._features,
            lambda parts, place: _each(encode_moments(half, parts, check, place)), _last, clips.guard,
        )  # fmt: skip

    def tile(self, clips: Clips) -> PlainPass:
        half, steps, check = self._half, clips.plan.steps, clips.guard.tick.check
        if half.program.half == "decoder":
            return PlainPass(
                half, slice(half.front, None), self._features,
                lambda parts, place: self._decode_frames(half, parts, steps, check, place=place), _unclamped,
                clips.guard,
            )  # fmt: skip
        return PlainPass(
            half, slice(half.front), self._video,
            lambda parts, place: _each(encode_features(half, parts, steps, check, place=place)), _last, clips.guard,
        )  # fmt: skip

    def _latents(self, part: Tensor) -> Tensor:
        return (part[None].to(self._device, torch.float32) / self._scale).to(self._dtype)

    def _video(self, part: Tensor) -> Tensor:
        return to_network(part[None], self._device, self._half.input_type(self._dtype))

    def _features(self, part: Tensor) -> Tensor:
        return part.permute(3, 0, 1, 2)[None].to(self._device, self._dtype)


def _each(results: Iterator[Tensor]) -> Iterator[tuple[Tensor]]:
    return ((result,) for result in results)


def _last(x: Tensor) -> Tensor:
    """Move channels last: [1, C, n, h, w] -> [n, h, w, C]."""
    return x[0].permute(1, 2, 3, 0)


def _unclamped(piece: Tensor) -> Tensor:
    """Turn frames about -1..1 into float32 about 0..1, [m, H, W, 3]."""
    return _last(piece.float().mul_(0.5).add_(0.5))
