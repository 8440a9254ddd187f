"""One requested decode or encode, run by one device alone or by several in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..network.steps import Latents
from ..planning.plan import Plan
from ..precision.policy import Policy
from ..request import Request
from . import call
from .core import Core
from .progress import Callbacks, OnPlan, Ticker
from .results import Finished, Results, Target
from .video import StreamVideo, TensorVideo


@dataclass(frozen=True)
class Job:
    """A decode or encode of whole clips.

    Attributes:
        half: "decoder" or "encoder".
        given: the input: latents as `Core.inside` returns them, or checked frames.
        request: options of the call.
        into: target of the results.
        wanted: results to make of each clip.
        latents: latents, rows and columns of latent pixels of a clip; UNKNOWN latents where a stream's length is.
        size: clips, frames, height and width in pixels, for the report.
        callbacks: of the caller.
        seed: of noise that a decoder adds itself; one device then makes the whole clip, unless that noise goes by the
            place of a frame.
    """

    half: str
    given: Tensor | Latents | TensorVideo | StreamVideo
    request: Request
    into: Target
    wanted: range
    latents: tuple[int, int, int]
    size: tuple[int, int, int, int]
    callbacks: Callbacks
    seed: int | None = None

    @property
    def clips(self) -> int:
        """Return the number of clips."""
        return self.given.shape[0] if self.half == "decoder" else self.given.batch

    def samples(self, vae: Core, cut: call.Cut, device: torch.device | None = None) -> list[Tensor]:
        """Return the samples that settle the component's operands, as `call.decoder_samples` does."""
        take = call.decoder_samples if self.half == "decoder" else call.encoder_samples
        return take(self.given, vae, cut, device)

    def alone(self, vae: Core, plan: Plan | None) -> Iterator[Finished]:
        """Make all results on the VAE's device; yield the finished ones that the target hands on. plan: made before."""
        results, callbacks = self.into.whole(self.wanted.start), self.callbacks
        return self.run(vae, slice(None), callbacks.ticker, results, self.wanted, callbacks.on_plan, plan)

    def run(
        self, core: Core, clips: slice, tick: Ticker, results: Results, wanted: range, on_plan: OnPlan | None,
        made: Plan | None = None, policy: Policy | None = None,
    ) -> Iterator[Finished]:  # fmt: skip
        """Make the wanted results of some clips on one device. Args, yields: those of `call.decode`."""
        if self.half == "encoder":
            return call.encode(core, self.given.of(clips), self.request, tick, results, wanted, on_plan, made, policy)
        z = self.given[clips] if isinstance(self.given, Tensor) else self.given  # files are read by one clip
        return call.decode(core, z, self.request, tick, results, wanted, self.size, on_plan, made, self.seed, policy)
