"""Memory of the fused operators: dry runs of the fused network, packed on the meta device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..extras.plain_memory.layouts import ByRules
from ..kernels.attention import attention, torch_bytes
from ..network.architecture import Architecture, colours_of
from ..network.fused import FusedDecoder, FusedEncoder, fuse
from ..network.program import Program
from ..options import Options
from ..precision.forms import Operands
from ..precision.policy import EXACT, Policy
from ..runtime.context import ExecutionContext
from ..runtime.memory import RESERVE_BYTES
from ..runtime.parking import Parking
from .cost import GRAPH_BYTES, Rates, Sizes
from .dryrun import peak_bytes
from .fusable import half_not_fused
from .meta import meta_model
from .plan import one_step

#: Bytes that operators allocate themselves in addition to the sums that a dry run counts (coefficients of norms,
#: scales, a library's small buffers), with the reserve that a run keeps for them.
TEMPORARY_BYTES = RESERVE_BYTES + (16 << 20)


class FusedWalk:
    """Dry runs of one model's fused network. Each covers one chunk of one clip; its sizes are cached."""

    def __init__(
        self, architecture: Architecture, config: Any, dtype: torch.dtype, options: Options, rates: Rates | None = None
    ) -> None:
        """Prepare dry runs of a model; `rates`: speeds of the machine that plans are for, where they are known."""
        self._rates = rates or Rates()
        self.architecture, self.config, self.dtype, self.options = architecture, config, dtype, options
        #: Devices that this process launches for at the same time, including the one that plans are for.
        self.launched = 1
        #: lacks(half): why this machine has no kernels to run that component; None: it has them.
        self.lacks: Callable[[str], str | None] = lambda half: None
        self._policies: dict[str, Policy] = {}
        self._sizes = functools.lru_cache(maxsize=1024)(self._dry_run)

    def use(self, half: str, policy: Policy) -> bool:
        """Plan "encoder" or "decoder" for these operands from now on; return True where they differ from before."""
        if policy == self._policies.get(half, EXACT):
            return False
        self._policies[half] = policy
        self.__dict__.pop("_networks", None)
        self._sizes.cache_clear()
        return True

    @property
    def rates(self) -> Rates:
        """Return the speeds of the machine that plans are for; assign others to plan for another machine."""
        return self._rates

    @rates.setter
    def rates(self, rates: Rates) -> None:
        if rates != self._rates:
            self._rates = rates
            self._sizes.cache_clear()

    def operands(self, half: str) -> Operands:
        """Return the operands that the component is packed for."""
        winograd = self.options.winograd is True and not self._programs[half].style.direct
        return Operands(self.dtype, self._policies.get(half, EXACT), winograd=winograd)

    def no_winograd(self, half: str) -> str | None:
        """Return why no convolution of the component is in Winograd form although it is on; None: some are."""
        if self.network(half).formed[0]:
            return None
        policy = self.operands(half).policy
        if why := self._programs[half].style.direct:
            return why
        if policy.kinds:
            return "layers in 8 bit have no such kernels"
        if policy.half_accumulate and self.dtype == torch.float16:
            return "layers whose products are summed in fp16 have no such kernels"
        return "its layers are narrower than those that have such kernels"

    def network(self, half: str) -> FusedDecoder | FusedEncoder:
        """Return the packed component as a run has it, without values."""
        return self._networks[half]

    @property
    def halves(self) -> tuple[str, ...]:
        """Return the components that the fused operators run."""
        return tuple(half for half in self._reasons if self.why_not(half) is None)

    def chunk(self, half: str) -> int:
        """Return the latents that must be in one chunk after a clip's first chunk; 1 where it is the whole clip,
        however short."""
        program = self._programs[half]
        return 1 if program.waits else (program.chunk or (1, 1))[1]

    def run(self, half: str, height: int, width: int) -> ExecutionContext:
        """Return a dry ExecutionContext of the smallest chunk of a component; height, width: in latent pixels."""
        network, a = self.network(half), self.architecture
        latents, meta = self.chunk(half), torch.device("meta")
        frames, clip = a.temporal * latents, latents if network.gathers else 0
        if half == "encoder":
            return network.plan(latents, a.spatial * height, a.spatial * width, frames, meta, None, clip)
        return network.plan(latents, height, width, frames, torch.float32, meta, None, clip)

    def why_not(self, half: str) -> str | None:
        """Return the reason that the fused operators do not run this component; None: they do."""
        return self._reasons.get(half) or self.lacks(half)

    @property
    def rate(self) -> int:
        """Return the frames of a latent as the rule for graphs counts them: at least four, also for pictures."""
        return max(self.architecture.temporal, 4)

    def late(self, half: str) -> bool:
        """Check if the component's frames come out only after later ones have gone in, in another chunk."""
        return half in self._programs and self._programs[half].late and not self._programs[half].waits

    def launches(self, half: str) -> bool:
        """Check if eager execution of the component launches kernels of ours."""
        return half in self._programs and self._programs[half].launches

    def single(self, half: str) -> bool:
        """Check if plain torch runs the component frame by frame, so that long chunks gain nothing."""
        return half in self._programs and self._programs[half].style.single

    @functools.cached_property
    def _programs(self) -> dict[str, Program]:
        return {p.half: p for p in self.architecture.programs(self.config)}

    @functools.cached_property
    def _reasons(self) -> dict[str, str | None]:
        return {half: half_not_fused(p, self.dtype) for half, p in self._programs.items()}

    def frames_per_step(self, half: str, height: int, width: int) -> int:
        """Return the frames at full size that make one well-filled step, for frames of height x width pixels.

        Threads that launch for several devices take turns, and a step must last longer than the others' turns: it has
        that many times more frames. For components that look ahead, more than one latent's frames are rounded down to
        whole latents, so that all steps of a chunk have one size."""
        count = max(1, self.architecture.step_pixels // (height * width)) * self.launched
        of = self.architecture.temporal
        return count // of * of if self.late(half) and count > of else count

    def sizes(
        self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype,
        frame: tuple[int, int] | None = None, parking: Parking | None = None, rest: tuple[int, int] = (0, 0),
        clip: int = 0, alone: bool = False,
    ) -> Sizes:  # fmt: skip
        """Return memory and work of a run in addition to the plain weights.

        Args:
            half: "encoder" or "decoder".
            latents: of a chunk.
            frames: per step, at full size.
            height, width: of the frame or tile, in latent pixels.
            output: type of the results.
            frame: height and width of the whole frame, where `height`, `width` are a tile's.
            parking: histories outside the rings, if any.
            rest: an encoder's rows and columns of pixels that fill no latent pixel.
            clip: all latents of the clip, where the network gathers them; else 0.
            alone: the clip is one chunk.
        """
        alone = alone and half == "encoder"  # latents are small
        return self._sizes(half, latents, frames, height, width, output, frame, parking, rest, clip, alone)

    def tile_bytes(self, frames: int, height: int, width: int, step: int) -> int:
        """Return the bytes of a self-tiling encoder in addition to the plain weights.

        Args:
            frames, height, width: of a tile, in frames and pixels.
            step: frames at full size at once.
        """
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
            # Frames of three chunks, which arrive ahead of their turn, or of one, and two copies on the way in, all in
            # float32; graphs read another copy.
            besides += (3 + 2 * (not alone) + recorded) * 4 * network.takes * t * latents * rows * cols
        elif frame is None:
            run = network.plan(latents, height, width, frames, output, meta, parking, clip)
            besides += _latent_bytes(clip or latents, height, width, network.latent_channels)
        else:
            # The part on whole frames and the tiles run one after the other.
            front = network.plan_front(clip or latents, *frame, meta)
            run = max(front, network.plan_tile(latents, height, width, frames, meta), key=lambda r: r.nbytes)
            besides += max(_latent_bytes(clip or latents, *frame, network.latent_channels),
                           self._tile_bytes(latents * network.features, frames, height, width))  # fmt: skip
        if network.attends:
            size, side = frame or (height, width), network.window
            tokens = side**2 if side else math.prod(size) * (clip or 1)
            if self.options.flash_attention:
                besides += torch_bytes(tokens, self.dtype.itemsize, network.attends)
            else:
                count = math.prod(-(-n // side) for n in size) if side else 1
                q, k, v = torch.empty(3, 1, tokens, network.attends, dtype=self.dtype, device=meta)
                besides += peak_bytes(lambda: attention.reference(q, k, v))
                besides += (count - 1) * tokens * network.attends * self.dtype.itemsize  # other windows' results
        sizes = Sizes.of(run, self._rates)
        return replace(sizes, device=sizes.device + besides)

    def _tile_bytes(self, channels: int, frames: int, height: int, width: int) -> int:
        """Return the bytes of a tile's features (this chunk's and the previous one's), blending weights and step.

        The weighted pixels of a step are in 16 bit. channels: of all latents in a chunk."""
        pixels, colours = self.architecture.spatial**2 * height * width, colours_of(self.config)[1]
        return 2 * self.dtype.itemsize * channels * height * width + (4 + colours * 2 * frames) * pixels


def _latent_bytes(latents: int, height: int, width: int, channels: int) -> int:
    """Return the bytes of a chunk's latents as they arrive and divided, and of the previous chunk's, in float32."""
    return 3 * 4 * latents * height * width * channels
