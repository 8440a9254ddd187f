"""The decoder as clips go through it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from ....execution.components import FusedComponents, PlainComponents
from ....execution.passes import Clips
from ....execution.plain_pass import PlainComponent, PlainPass
from ....network.plain import Network
from ....network.state import Place
from ....network.steps import Steps
from ....network.stream import decode_features, decode_frames
from ....options import Options
from ....planning.plan import Plan
from ....report import Report
from ....runtime.handover import Handover
from ..diffusion import Given
from ..neighbours import GROUP
from .noise import FrameNoise, words_of_noise


class Components:
    """The decoder of one model, with the copy of its weights that `PlainComponents` keeps."""

    def __init__(
        self, model: Network, dtype: torch.dtype, options: Options, kind: str | None, fused: FusedComponents,
        plain: PlainComponents,
    ) -> None:  # fmt: skip
        """kind: type of 8-bit products that scale their own operands; None: `dtype`."""
        self._program, self._dtype, self._kind, self._plain = model.decoder.program, dtype, kind, plain
        self._overlap = options.overlap
        self._spatial, self._temporal = plain.architecture.spatial, plain.architecture.temporal
        #: What the step made of the weights, and the stream on which it did.
        self._kept: tuple[object, dict[Hashable, Any]] | None = None

    def half(self, name: str, plan: Plan, device: torch.device, scale: float, seed: int | None = None) -> Decoder:
        """Return the decoder for clips. seed: of its noise; None: that of ComfyUI."""
        return Decoder(
            self._plain.there(name, device), self._spatial, self._temporal, scale, self._dtype, device, seed,
            self._overlap, kind=self._kind, kept=self.kept(device),
        )  # fmt: skip

    def kept(self, device: torch.device) -> dict[Hashable, Any]:
        """Return what the step made of the weights in earlier calls; nothing where that was on another stream, on which
        it may not be complete."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if self._kept is None or self._kept[0] != stream:
            self._kept = stream, {}
        return self._kept[1]

    def packed_bytes(self, half: str) -> int:
        """Return 0: the copy of the weights is that of PlainComponents, and plans count the rest with the run."""
        return 0

    def release(self, keep: str = "") -> int:
        """Free what the step made of the weights, unless `keep` is "decoder"."""
        if keep != "decoder":
            self._kept = None
        return 0

    def begin(self, report: Report, size: tuple[int, int, int], seed: int | None) -> None:
        latents, height, width = size
        sides = self._spatial * height, self._spatial * width
        report.noise = words_of_noise(seed, self._program.frames(latents), *sides, self._dtype)

    def frames(
        self, z: Tensor, steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[Iterator[Tensor]]:
        """Decode the network's latents as `PlainComponents.frames` does, from ComfyUI's noise."""
        half = self._plain.there("decoder", device)
        sides = (self._spatial * n for n in z.shape[3:])
        noise = FrameNoise(None, half.program.frames(z.shape[2]), *sides, self._dtype, device, len(z))

        def decoded(clip: int) -> Iterator[Iterator[Tensor]]:
            latents = z[clip : clip + 1].split(steps.latents or z.shape[2], 2)
            parts = (part.to(device, self._dtype) for part in latents)
            given = Given(functools.partial(noise, clip=clip), steps.passes, check, self._kind)
            return decode_frames(half, decode_features(half, parts, check), steps, check, given=given)

        chunks = zip(*map(decoded, range(len(z))), strict=True)
        return (iter([torch.cat([torch.cat(list(frames), 2) for frames in chunk])]) for chunk in chunks)


class Decoder(PlainComponent):
    """A decoder whose clips begin with noise. Where copies overlap with work, its results are copied to the host, and
    latents to the device, while the next ones are made."""

    def __init__(self, *plain: Any, kind: str | None, kept: dict[Hashable, Any]) -> None:
        """plain: as of PlainComponent. kind, kept: as of Given."""
        super().__init__(*plain)
        self._kind, self._kept = kind, kept

    def _given(self, clips: Clips, whole: bool) -> Given:
        frames, sides = self.program.frames(clips.latents), (self.spatial * n for n in (clips.height, clips.width))
        room = self._room(clips) if whole else 0
        noise = FrameNoise(self._seed, frames, *sides, self._dtype, self._device, room=room)
        return Given(noise, clips.plan.steps.passes, clips.guard.tick.check, self._kind, self._kept)

    def _pass(self, given: Given, *rest: Any) -> PlainPass:
        return FromNoise(given.noise, GROUP if self.ahead else 0, self._half, *rest)

    def _room(self, clips: Clips) -> int:
        """Return the bytes of the plan, beside the weights, that it does not take before it needs its noise."""
        if not self.ahead:
            return 0
        size = clips.latents, clips.height, clips.width, self._dtype.itemsize
        first = sum(step.memory(*size, 0, kernels=False) or 0 for step in self.program.steps)
        return clips.plan.own_bytes - sum(p.nbytes for p in self._half.parameters()) - first


class FromNoise(PlainPass):
    """A PlainPass of a decoder that begins with noise."""

    def __init__(self, noise: FrameNoise, at_once: int, *plain: Any) -> None:
        super().__init__(*plain)
        self._noise, self.at_once = noise, at_once

    def begin(self, clip: int, first: int, left: Handover | None, corner: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        self._noise.corner = corner
        through = super().begin(clip, first, left, corner)
        begins = self._begins(first)[0]
        self._noise.first = self._program.rates[-1] * begins  # of the whole clip
        self._place = Place(dict.fromkeys((step.name for step in self._program.steps), 0), origin=begins)
        return through

    def _clear(self) -> None:
        """Leave the cache while noise is on its way to the host, for which that would wait; its end clears it."""
        if not self._noise.copying:
            super()._clear()
