"""Execute clips and tiles on plain torch: the passes of a component without fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..network.plain import Half
from ..network.state import Place
from ..network.stream import decode_features, decode_frames, encode_features, encode_moments
from ..runtime.allowance import reuses_blocks
from ..runtime.handover import Handover
from ..runtime.pixels import to_network, to_pixels
from ..system.devices import empty_device_cache, keeps_blocks
from .clip import Looped
from .guard import Guard
from .passes import Clips, Emit, Part, Pass
from .staging import StagedReader


class PlainPass(Pass):
    """A Pass that executes modules eagerly. It allocates no memory of its own."""

    gives = True

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
        super().__init__(half.program, steps, guard)
        self._load, self._network, self._form = load, network, form

    def begin(self, clip: int, first: int, left: Handover | None, corner: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Start the clip or part. Histories in `left` are ignored: those of another kind of pass do not fit."""
        self._clear()
        names, begins = [step.name for step in self._program.steps], self._begins(first)
        if not self._program.staged:
            self._place = None
            return 0, 0
        self._place = Place(dict(zip(names, begins, strict=True)))
        return begins[self._steps][0], 0

    def _clear(self) -> None:
        """Free the cache: plans have every clip and tile begin with an empty one. In blocks that the tile before had
        cut, two tiles of SeedVR2 reserved 13.5 GB where 11.6 were planned (H200)."""
        if keeps_blocks(self._guard.device) and not reuses_blocks():
            empty_device_cache()

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


class PlainComponent(Looped):
    """A component (encoder or decoder) that executes clips eagerly (execution/clip.py)."""

    def __init__(
        self, half: Half, spatial: int, temporal: int, scale: float, dtype: torch.dtype, device: torch.device,
        seed: int | None = None, ahead: bool = False,
    ) -> None:  # fmt: skip
        self.program, self.spatial, self.temporal, self.ahead = half.program, spatial, temporal, ahead
        self._seed = seed
        self._half, self._scale, self._dtype, self._device = half, scale, dtype, device
        self._reader = StagedReader(device, self.ahead)

    def whole(self, clips: Clips) -> PlainPass:
        half, steps, check, every = self._half, clips.plan.steps, clips.guard.tick.check, slice(None)
        if half.program.half == "decoder":
            given = self._given(clips, True)

            def decode(parts: Iterator[Tensor], place: Place | None) -> Iterator[Iterator[Tensor]]:
                found = decode_features(half, parts, check, self._seed, place)
                return decode_frames(half, found, steps, check, seed=self._seed, place=place, given=given)

            def form(piece: Tensor) -> Tensor:
                return to_pixels(piece, clips.dtype, clips.signed)[0]

            return self._pass(given, every, self._latents, decode, form, clips.guard)

        def encode(parts: Iterator[Tensor], place: Place | None) -> Iterator[tuple[Tensor]]:
            features = encode_features(half, parts, steps, check, place=place)
            return _each(encode_moments(half, features, check, place))

        return PlainPass(half, every, self._video, encode, _last, clips.guard)

    def low(self, clips: Clips) -> PlainPass:
        half, check = self._half, clips.guard.tick.check
        if half.program.half == "decoder":
            return PlainPass(
                half, slice(half.front), self._latents,
                lambda parts, place: _each(decode_features(half, parts, check, self._seed, place)), _last, clips.guard,
            )  # fmt: skip
        return PlainPass(
            half, slice(half.front, None), self._features,
            lambda parts, place: _each(encode_moments(half, parts, check, place)), _last, clips.guard,
        )  # fmt: skip

    def tile(self, clips: Clips) -> PlainPass:
        half, steps, check = self._half, clips.plan.steps, clips.guard.tick.check
        if half.program.half == "decoder":
            given = self._given(clips, False)

            def decode(parts: Iterator[Tensor], place: Place | None) -> Iterator[Iterator[Tensor]]:
                return decode_frames(half, parts, steps, check, seed=self._seed, place=place, given=given)

            return self._pass(given, slice(half.front, None), self._features, decode, _unclamped, clips.guard)
        return PlainPass(
            half, slice(half.front), self._video,
            lambda parts, place: _each(encode_features(half, parts, steps, check, place=place)), _last, clips.guard,
        )  # fmt: skip

    def _given(self, clips: Clips, whole: bool) -> Any:
        """Return what a family's own decoder gives its steps for these clips, in whole frames or in tiles; None: this
        one gives nothing."""
        return None

    def _pass(self, given: Any, *rest: Any) -> PlainPass:
        """Return the pass of a decoder that ends in pixels. given: as of `_given`. rest: as of PlainPass."""
        return PlainPass(self._half, *rest)

    def _latents(self, part: Tensor) -> Tensor:
        there = self._reader.read(part[None].contiguous())
        return (there.to(self._device, torch.float32) / self._scale).to(self._dtype)

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
