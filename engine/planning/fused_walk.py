"""What the fused operators take: dry runs of the fused network, packed on the meta device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..archs import Architecture, colours_of
from ..kernels.attention import reference
from ..network.fused import FusedDecoder, FusedEncoder, fuse
from ..network.program import Program
from ..operands.forms import Operands
from ..operands.policy import EXACT, Policy
from ..options import Options
from ..run.graphs import GRAPH_BYTES, one_step
from ..run.memory import RESERVE_BYTES
from ..run.parking import Parking
from ..run.run import Run
from .cost import Rates, Sizes
from .dryrun import peak_bytes
from .fusable import half_not_fused
from .layouts import ByRules
from .meta import meta_model

#: What operators allocate themselves besides the sums that a walk counts (coefficients of norms, scales, a library's
#: small buffers), and what a run keeps in reserve for them.
TEMPORARY_BYTES = RESERVE_BYTES + (16 << 20)


class FusedWalk:
    """For one model. Each walk takes one chunk of one clip, and is remembered."""

    def __init__(
        self, architecture: Architecture, config: Any, dtype: torch.dtype, options: Options, rates: Rates | None = None
    ) -> None:
        """rates: of the machine it is for, where they are known."""
        self._rates = rates or Rates()
        self.architecture, self.config, self.dtype, self.options = architecture, config, dtype, options
        #: Devices that this process launches for at the same time, with the one that plans are for.
        self.launched = 1
        #: lacks(half): why no kernels are there to run it on this machine; None: they are.
        self.lacks: Callable[[str], str | None] = lambda half: None
        self._policies: dict[str, Policy] = {}
        self._sizes = functools.lru_cache(maxsize=1024)(self._dry_run)

    def use(self, half: str, policy: Policy) -> bool:
        """Plan "encoder" or "decoder" for these operands from now on. Returns whether they are others."""
        if policy == self._policies.get(half, EXACT):
            return False
        self._policies[half] = policy
        self.__dict__.pop("_networks", None)
        self._sizes.cache_clear()
        return True

    @property
    def rates(self) -> Rates:
        """Of the machine that plans are for."""
        return self._rates

    @rates.setter
    def rates(self, rates: Rates) -> None:
        if rates != self._rates:
            self._rates = rates
            self._sizes.cache_clear()

    def operands(self, half: str) -> Operands:
        return Operands(self.dtype, self._policies.get(half, EXACT), winograd=self.options.winograd)

    def in_8_bit(self, half: str) -> bool:
        """Whether convolutions of it are, some at least."""
        return bool(self.operands(half).policy.kinds)

    def network(self, half: str) -> FusedDecoder | FusedEncoder:
        """The half as a run has it, without values."""
        return self._networks[half]

    @property
    def halves(self) -> tuple[str, ...]:
        """Those that the fused operators run."""
        return tuple(half for half in self._reasons if self.why_not(half) is None)

    def chunk(self, half: str) -> int:
        """Latents that must go together behind a clip's first ones."""
        return (self._programs[half].chunk or (1, 1))[1]

    def run(self, half: str, height: int, width: int) -> Run:
        """A dry Run of a chunk of a latent, or of what must go together; sizes in latent pixels."""
        network, a = self.network(half), self.architecture
        latents, meta = self.chunk(half), torch.device("meta")
        frames, clip = a.temporal * latents, latents if network.gathers else 0
        if half == "encoder":
            return network.plan(latents, a.spatial * height, a.spatial * width, frames, meta, None, clip)
        return network.plan(latents, height, width, frames, torch.float32, meta, None, clip)

    def why_not(self, half: str) -> str | None:
        """The reason this half is not run by the fused operators, where the other may be; None: it is."""
        return self._reasons.get(half) or self.lacks(half)

    @property
    def rate(self) -> int:
        """Frames of a latent as graphs count them: chunks of pictures are recorded as those of four frames are."""
        return max(self.architecture.temporal, 4)

    def late(self, half: str) -> bool:
        """Whether its frames come out after others have gone in."""
        return half in self._programs and self._programs[half].late

    def single(self, half: str) -> bool:
        """Whether its plain walk takes single frames, to which long chunks are of no use."""
        return half in self._programs and self._programs[half].style.single

    @functools.cached_property
    def _programs(self) -> dict[str, Program]:
        return {p.half: p for p in self.architecture.programs(self.config)}

    @functools.cached_property
    def _reasons(self) -> dict[str, str | None]:
        return {half: half_not_fused(p, self.dtype) for half, p in self._programs.items()}

    def frames_per_step(self, half: str, height: int, width: int) -> int:
        """Frames at full size that make one well-filled step, for a frame of this many pixels. Threads that launch for
        several devices take turns, which a step has to outlast: it has as many times more. Of halves that look ahead,
        those of whole latents if they are more than one's: all steps of a chunk are then of one size."""
        count = max(1, self.architecture.step_pixels // (height * width)) * self.launched
        of = self.architecture.temporal
        return count // of * of if self.late(half) and count > of else count

    def sizes(
        self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype,
        frame: tuple[int, int] | None = None, parking: Parking | None = None, rest: tuple[int, int] = (0, 0),
        clip: int = 0, alone: bool = False,
    ) -> Sizes:  # fmt: skip
        """What a run takes besides the plain weights, for `latents` and `frames` per step.

        height, width: of the frame or tile, in latent pixels; frame: the whole frame's, where that is a tile. rest: an
        encoder's rows and columns of pixels that fill no latent pixel. clip: all latents, where they are gathered.
        alone: the clip is one chunk.
        """
        alone = alone and half == "encoder"  # latents are small
        return self._sizes(half, latents, frames, height, width, output, frame, parking, rest, clip, alone)

    def tile_bytes(self, frames: int, height: int, width: int, step: int) -> int:
        """What an encoder that tiles itself takes besides the plain weights, for tiles of so many frames and pixels,
        `step` frames at full size at once."""
        network, meta = self.network("encoder"), torch.device("meta")
        return network.tile_run(frames, height, width, step, meta).nbytes + network.nbytes + TEMPORARY_BYTES

    @functools.cached_property
    def _networks(self) -> dict[str, FusedDecoder | FusedEncoder]:
        model = meta_model(self.architecture, self.config)
        with torch.device("meta"), torch.no_grad(), ByRules():
            halves = [h for h in ("encoder", "decoder") if getattr(model, h) is not None and not self.why_not(h)]
            return {h: fuse(getattr(model, h), self.dtype, self.options, self.operands(h)) for h in halves}

    def _dry_run(
        self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype,
        frame: tuple[int, int] | None, parking: Parking | None, rest: tuple[int, int], clip: int, alone: bool,
    ) -> Sizes:
        network, meta = self.network(half), torch.device("meta")
        recorded = self.options.cuda_graphs and frame is None and parking is None
        recorded = recorded and one_step(latents, frames, self.rate)
        besides = network.nbytes + TEMPORARY_BYTES + GRAPH_BYTES * recorded
        if half == "encoder":
            s, t = self.architecture.spatial, self.architecture.temporal
            rows, cols = s * height + rest[0], s * width + rest[1]
            run = network.plan(latents, rows, cols, frames, meta, parking, clip)
            # Three chunks' frames as they arrive ahead of their turn, or one's, and two copies on the way in, all in
            # float32; graphs read another copy.
            besides += (3 + 2 * (not alone) + recorded) * 4 * network.takes * t * latents * rows * cols
        elif frame is None:
            run = network.plan(latents, height, width, frames, output, meta, parking, clip)
            besides += _latent_bytes(clip or latents, height, width, network.latent_channels)
        else:
            # Front and tiles run one after the other.
            front = network.plan_front(clip or latents, *frame, meta)
            run = max(front, network.plan_tile(latents, height, width, frames, meta), key=lambda r: r.nbytes)
            besides += max(_latent_bytes(clip or latents, *frame, network.latent_channels),
                           self._tile_bytes(latents * network.features, frames, height, width))  # fmt: skip
        if network.attends and not self.options.flash_attention:
            tokens = math.prod(frame or (height, width)) * (clip or 1)
            besides += _plain_attention_bytes(tokens, network.attends, self.dtype)
        sizes = Sizes.of(run, self._rates)
        return replace(sizes, device=sizes.device + besides)

    def _tile_bytes(self, channels: int, frames: int, height: int, width: int) -> int:
        """A tile's features as they arrive and those of the chunk before, the weights of its pixels, and the weighted
        pixels of a step in 16 bit. channels: of all latents in a chunk."""
        pixels, colours = self.architecture.spatial**2 * height * width, colours_of(self.config)[1]
        return 2 * self.dtype.itemsize * channels * height * width + (4 + colours * 2 * frames) * pixels


def _latent_bytes(latents: int, height: int, width: int, channels: int) -> int:
    """A chunk's latents as they arrive, divided, and those of the chunk before."""
    return 3 * 4 * latents * height * width * channels


def _plain_attention_bytes(tokens: int, channels: int, dtype: torch.dtype) -> int:
    q, k, v = torch.empty(3, 1, tokens, channels, dtype=dtype, device="meta")
    return peak_bytes(lambda: reference.attention(q, k, v))
