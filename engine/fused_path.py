"""Whether the fused operators can run a model here, and if so, their weights, plans and runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .archs import Architecture, by_name
from .kernels.attention import reference
from .kernels.conv3d import padded_channels
from .kernels.probe import proven
from .kernels.targets import target
from .network.fused import Emit, FusedDecoder, FusedEncoder, FusedPass, fuse
from .network.plain import Network
from .network.program import Program
from .operands.forms import Operands
from .operands.policy import EXACT, Policy
from .options import Options
from .planning.cost import Sizes
from .planning.dryrun import peak_bytes
from .precision.prepared import load, moved, recipe, save
from .precision.store import Store
from .run.clip import Clips
from .run.devices import empty_device_cache
from .run.graphs import GRAPH_BYTES, one_step, why_none
from .run.memory import RESERVE_BYTES
from .run.parking import Parking
from .run.pixels import StagedReader, to_unit
from .run.reuse import Runs, allocated
from .run.run import Run

#: What operators allocate themselves besides the sums that a walk counts (coefficients of norms, scales, a library's
#: small buffers), and what a run keeps in reserve for them.
TEMPORARY_BYTES = RESERVE_BYTES + (16 << 20)
#: Full-size pixels per step that fill a GPU. At 1280x720, one frame per step is as fast as eight (H200).
STEP_PIXELS = 1 << 20


def why_off(
    architecture: str, config: Any, dtype: torch.dtype, device: torch.device, emulate: bool = False,
    probe: bool = False,
) -> str | None:
    """The reason the fused operators cannot run this model on this device, or None. config None: published widths.

    emulate: on a CPU their references will do, for numbers that plain torch cannot give. probe: a GPU must have run a
    first kernel; without it nothing is run, and a GPU that has not been tried is trusted.
    """
    known = by_name(architecture)
    if known is None:
        return f"no fused network for {architecture}"
    here = proven(device) if probe else target(device)
    if not (emulate and device.type == "cpu"):
        if not here.kernels:
            return here.notes[0] if here.notes else f"no kernels for {device}"
        if not here.supports(dtype):
            return f"no fused kernels for {dtype}: plain torch keeps its precision"
    return None if config is None else not_fused(known.programs(config), dtype)


def not_fused(programs: Sequence[Program], dtype: torch.dtype) -> str | None:
    """The reason the fused operators cannot run these networks on any device, or None."""
    reason = next((why for p in programs if (why := p.why_not_fused())), None)
    odd = sorted({w for p in programs for w in p.widths() if padded_channels(w, dtype) != w})
    return reason or (f"widths {odd} are no multiples of {padded_channels(1, dtype)}" if odd else None)


class FusedPath:
    """The fused halves of one model: packed when first used, dropped by `release`."""

    def __init__(
        self, model: Network, architecture: Architecture, dtype: torch.dtype, options: Options,
        store: Store | None = None,
    ) -> None:
        """store: where packed 8-bit weights are kept."""
        self._model = model
        self._architecture = architecture
        self._dtype = dtype
        self._options = options
        self._store = store or Store(None)
        self._policies: dict[str, Policy] = {}
        self._packed: dict[str, FusedDecoder | FusedEncoder] = {}
        self._sizes = functools.lru_cache(maxsize=1024)(self._dry_run)
        self.runs = Runs(options.cuda_graphs)

    def decoder(self) -> FusedDecoder:
        return self._get("decoder")  # type: ignore[return-value]

    def encoder(self) -> FusedEncoder:
        return self._get("encoder")  # type: ignore[return-value]

    def use(self, half: str, policy: Policy) -> None:
        """Pack and plan "encoder" or "decoder" for these operands from now on."""
        if policy != self._policies.get(half, EXACT):
            self._policies[half] = policy
            self._packed.pop(half, None)
            self.__dict__.pop("_meta", None)
            self._sizes.cache_clear()
            self.runs.forget()
            self.runs = Runs(self._options.cuda_graphs)  # other kernels, other times

    def release(self, keep: str = "") -> int:
        """Give kept runs and the packed weights back, but those of the half `keep`; the next use packs anew (0.15 s for
        the published decoder on an H200). Returns the weights' bytes."""
        freed = sum(network.nbytes for half, network in self._packed.items() if half != keep)
        self._packed = {half: network for half, network in self._packed.items() if half == keep}
        self.runs.forget()
        return freed

    def packed_bytes(self, half: str) -> int:
        """Bytes of the packed weights now held for "encoder" or "decoder"; `sizes` counts them too."""
        return self._packed[half].nbytes if half in self._packed else 0

    def frames_per_step(self, height: int, width: int) -> int:
        """Frames at full size that make one well-filled step, for a frame of this many pixels."""
        return max(1, STEP_PIXELS // (height * width))

    def sizes(
        self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype,
        frame: tuple[int, int] | None = None, parking: Parking | None = None, rest: tuple[int, int] = (0, 0),
    ) -> Sizes:
        """What a run takes besides the plain weights, for `latents` and `frames` per step.

        height, width: of the frame or tile, in latent pixels; frame: the whole frame's, where that is a tile. rest: an
        encoder's rows and columns of pixels that fill no latent pixel.
        """
        return self._sizes(half, latents, frames, height, width, output, frame, parking, rest)

    def half(self, name: str, scale: float, device: torch.device) -> FusedHalf:
        """"encoder" or "decoder" for clips, its weights packed. scale: what latents are divided by."""
        return FusedHalf(self._get(name), self.runs, self._architecture, self._options, scale, device)

    def _get(self, half: str) -> FusedDecoder | FusedEncoder:
        if half not in self._packed:
            self._packed[half] = self._prepared(half)
            if next(getattr(self._model, half).parameters()).is_cuda:
                empty_device_cache()  # packing goes through fp32: 0.2 GB that would stay reserved
        return self._packed[half]

    @functools.cached_property
    def _meta(self) -> dict[str, FusedDecoder | FusedEncoder]:
        with torch.device("meta"), torch.no_grad():
            model = self._architecture.build(self._model.config)
            halves = [h for h in ("encoder", "decoder") if getattr(model, h) is not None]
            return {h: self._pack(h, model) for h in halves}

    def _prepared(self, half: str) -> FusedDecoder | FusedEncoder:
        """8-bit weights from the store, where they have been packed before; 16-bit ones cost less to pack than read."""
        if not self._policies.get(half, EXACT).kinds:
            return self._pack(half, self._model)
        options, place = self._options, self._store.prepared(half)
        made_from = recipe(self._operands(half), options.composed_upsample, options.flash_attention)
        device = next(getattr(self._model, half).parameters()).device
        network = None if place is None else load(self._meta[half], place, made_from, device)
        if network is None:
            # By way of the host: results lie among fp32 temporaries several times their size, which torch's allocator
            # cannot give back as long as a part of them is in use.
            network = moved(self._pack(half, self._model), "cpu")
            if place is not None:
                save(network, place, made_from)
            if device.type == "cuda":
                empty_device_cache()
            network = moved(network, device)
        return network

    def _tile_bytes(self, channels: int, frames: int, height: int, width: int) -> int:
        """A tile's features as they arrive and those of the chunk before, the weights of its pixels, and the weighted
        pixels of a step in 16 bit. channels: of all latents in a chunk."""
        pixels = self._architecture.spatial**2 * height * width
        return 2 * self._dtype.itemsize * channels * height * width + (4 + 3 * 2 * frames) * pixels

    def _pack(self, half: str, model: Network) -> FusedDecoder | FusedEncoder:
        return fuse(getattr(model, half), self._dtype, self._options, self._operands(half))

    def _operands(self, half: str) -> Operands:
        return Operands(self._dtype, self._policies.get(half, EXACT))

    def _dry_run(
        self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype,
        frame: tuple[int, int] | None, parking: Parking | None, rest: tuple[int, int],
    ) -> Sizes:
        network, meta = self._meta[half], torch.device("meta")
        recorded = self._options.cuda_graphs and frame is None and parking is None and one_step(latents, frames)
        besides = network.nbytes + TEMPORARY_BYTES + GRAPH_BYTES * recorded
        if half == "encoder":
            s, t = self._architecture.spatial, self._architecture.temporal
            rows, cols = s * height + rest[0], s * width + rest[1]
            run = network.plan(latents, rows, cols, frames, meta, parking)
            # Three chunks' frames as they arrive ahead of their turn, and two copies on the way in, all in float32;
            # graphs read another copy.
            besides += (5 + recorded) * 4 * 3 * t * latents * rows * cols
        elif frame is None:
            run = network.plan(latents, height, width, frames, output, meta, parking)
            besides += _latent_bytes(latents, height, width, network.latent_channels)
        else:
            # Front and tiles run one after the other.
            front = network.plan_front(latents, *frame, meta)
            run = max(front, network.plan_tile(latents, height, width, frames, meta), key=lambda r: r.nbytes)
            besides += max(_latent_bytes(latents, *frame, network.latent_channels),
                           self._tile_bytes(latents * network.features, frames, height, width))  # fmt: skip
        if not self._options.flash_attention:
            tokens = math.prod(frame or (height, width))
            besides += _plain_attention_bytes(tokens, network.attends, self._dtype)
        sizes = Sizes.of(run)
        return replace(sizes, device=sizes.device + besides)


def _latent_bytes(latents: int, height: int, width: int, channels: int) -> int:
    """A chunk's latents as they arrive, divided, and those of the chunk before."""
    return 3 * 4 * latents * height * width * channels


def _plain_attention_bytes(tokens: int, channels: int, dtype: torch.dtype) -> int:
    q, k, v = torch.empty(3, 1, tokens, channels, dtype=dtype, device="meta")
    return peak_bytes(lambda: reference.attention(q, k, v))


class FusedHalf:
    """Packed weights as clips go through them (run/clip.py)."""

    def __init__(
        self, network: FusedDecoder | FusedEncoder, runs: Runs, architecture: Architecture, options: Options,
        scale: float, device: torch.device,
    ) -> None:  # fmt: skip
        self.spatial, self.temporal = architecture.spatial, architecture.temporal
        self.ahead = options.async_offload
        self._network = network
        self._runs = runs
        self._graphs = options.cuda_graphs
        self._scale = scale
        self._device = device
        self._reader = StagedReader(device, self.ahead)

    def whole(self, clips: Clips) -> FusedPass:
        network, plan, steps = self._network, clips.plan, clips.plan.steps
        parking = plan.parking and replace(plan.parking, prefetch=self.ahead)
        size = steps.latents, clips.height, clips.width, steps.frames
        if isinstance(network, FusedDecoder):
            size = *size, clips.dtype, self._device

            def step(run: Run, z: Tensor, emit: Emit) -> None:
                network.chunk(run, z, steps.frames, clips.dtype, emit)

            def replay(run: Run, z: Tensor) -> Tensor:
                return network.whole_chunk(run, steps.frames, clips.dtype, z)
        else:
            size = *size, self._device

            def step(run: Run, video: Tensor, emit: Emit) -> None:
                moments = network.chunk(run, video, steps.frames)
                if not run.dry:
                    emit(moments)

            def replay(run: Run, video: Tensor) -> Tensor:
                return network.chunk(run, video, steps.frames)

        load = self._latents if isinstance(network, FusedDecoder) else self._video
        return FusedPass(
            clips, lambda: self._runs.run(lambda: network.plan(*size, parking), network, size, plan, clips.guard),
            load, step, replay,
        )  # fmt: skip

    def low(self, clips: Clips) -> FusedPass:
        self._runs.no_graphs = why_none(self._graphs, clips.plan)
        run = self._network.plan_front(clips.plan.steps.latents, clips.height, clips.width, self._device)
        return FusedPass(clips, self._alone(run, clips), self._latents, self._network.front_chunk)

    def tile(self, clips: Clips) -> FusedPass:
        grid, steps, network = clips.plan.grid, clips.plan.steps, self._network
        run = network.plan_tile(steps.latents, grid.rows.size, grid.cols.size, steps.frames, self._device)

        def step(run: Run, x: Tensor, emit: Emit) -> None:
            network.tile_chunk(run, x, steps.frames, emit)

        return FusedPass(clips, self._alone(run, clips), self._features, step)

    def _alone(self, run: Run, clips: Clips) -> Callable[[], AbstractContextManager[tuple[Run, None]]]:
        """The memory of a run without graphs."""

        @contextmanager
        def memory() -> Iterator[tuple[Run, None]]:
            with allocated(run, clips.guard):
                yield run, None

        return memory

    def _latents(self, part: Tensor) -> Tensor:
        """[C, n, h, w] -> [n, h, w, C] float32 on the device, unscaled."""
        return self._reader.read(part).permute(1, 2, 3, 0).float() / self._scale

    def _video(self, part: Tensor) -> Tensor:
        return to_unit(self._reader.read(part))

    def _features(self, part: Tensor) -> Tensor:
        """A copy of its own, which `tile_chunk` overwrites."""
        return torch.empty(part.shape, dtype=part.dtype, device=self._device).copy_(part)
