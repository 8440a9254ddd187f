"""Components of one model (encoder and decoder) as clips go through them: packed for the fused operators, or plain
modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..archs import Architecture
from ..kernels.conv3d.tuned import version
from ..network.fused import Emit, FusedDecoder, FusedEncoder, fuse
from ..network.hosted import lent, moving, moving_bytes
from ..network.plain import Half, Network
from ..network.program import Program
from ..network.steps import Steps
from ..network.stream import decode_features, decode_frames, encode_features, encode_moments
from ..options import Options
from ..planning.besides import reserved_for
from ..planning.fused_walk import FusedWalk
from ..planning.plan import why_none
from ..precision.policy import Policy
from ..precision.prepared import gathered, load, recipe, save
from ..precision.store import Store
from ..runtime.pixels import to_unit
from ..runtime.run import Run
from ..system.devices import empty_device_cache
from .fused_pass import FusedPass
from .passes import Clips, Part
from .plain_pass import PlainHalf
from .reuse import Runs, allocated
from .staging import StagedReader


def other_half(half: str) -> str:
    """Return the other one of "encoder" and "decoder"."""
    return "encoder" if half == "decoder" else "decoder"


class FusedHalves:
    """The fused components of one model: packed when first used, dropped by `release`."""

    def __init__(self, model: Network, walk: FusedWalk, device: torch.device, store: Store | None = None) -> None:
        """walk: the dry run that plans follow; `use` changes it too. device: of the packed weights. store: where 8-bit
        ones are kept."""
        self._model = model
        self._walk = walk
        self._device = device
        self._architecture = walk.architecture
        self._dtype = walk.dtype
        self._options = walk.options
        self._store = store or Store(None)
        self._packed: dict[str, FusedDecoder | FusedEncoder] = {}
        self.runs = Runs(walk.options.cuda_graphs, walk.rate)

    def decoder(self) -> FusedDecoder:
        return self._get("decoder")  # type: ignore[return-value]

    def encoder(self) -> FusedEncoder:
        return self._get("encoder")  # type: ignore[return-value]

    def use(self, half: str, policy: Policy) -> bool:
        """Pack and plan "encoder" or "decoder" for these operands from now on; return True if they changed."""
        changed = self._walk.use(half, policy)
        if changed:
            self._packed.pop(half, None)
            self.runs.forget()
            self.runs = Runs(self._options.cuda_graphs, self._walk.rate)  # other kernels, other times
        return changed

    def release(self, keep: str = "") -> int:
        """Free kept runs and the packed weights, except those of the component `keep`; return the weights' bytes.

        The next use packs anew (0.15 s for the published decoder on an H200 that holds the original weights).
        """
        freed = sum(network.nbytes for half, network in self._packed.items() if half != keep)
        self._packed = {half: network for half, network in self._packed.items() if half == keep}
        self.runs.forget()
        return freed

    def packed_bytes(self, half: str) -> int:
        """Return the bytes of the packed weights now held for "encoder" or "decoder"; plans count them too."""
        return self._packed[half].nbytes if half in self._packed else 0

    def half(self, name: str, scale: float, device: torch.device) -> FusedHalf:
        """Return "encoder" or "decoder" for clips, its weights packed. scale: latents are divided by it."""
        program = getattr(self._model, name).program
        return FusedHalf(
            self._get(name), program, self.runs, self._architecture, self._options, scale, device,
        )  # fmt: skip

    def pack(self, half: str, most: int | None = None) -> None:
        """Pack "decoder" or "encoder", if it is not packed. most: bytes on the device that its run is planned with, the
        packed weights among them, and the model's where those lie there."""
        if half in self._packed:
            return
        part, make = getattr(self._model, half), functools.partial(self._prepared, half)
        if self._device.type != "cuda":
            self._packed[half] = make()
            return
        there = tuple(p for p in part.parameters() if p.is_cuda)
        room = None
        if most is not None:
            room = most - self._walk.network(half).nbytes - (moving_bytes(self._model) if there else 0)
        self._packed[half] = gathered(make, there, self._device, room)
        empty_device_cache()

    def _get(self, half: str) -> FusedDecoder | FusedEncoder:
        self.pack(half)
        return self._packed[half]

    def _prepared(self, half: str) -> FusedDecoder | FusedEncoder:
        """Return the packed network: 8-bit weights from the store, where they have been packed before; 16-bit ones cost
        less to pack than to read."""
        if not self._walk.in_8_bit(half):
            return self._pack(half, self._model)
        options, place = self._options, self._store.prepared(half)
        made_from = recipe(self._walk.operands(half), options.composed_upsample, options.flash_attention,
                           options.winograd)  # fmt: skip
        network = None if place is None else load(self._walk.network(half), place, made_from, self._device)
        if network is None:
            network = self._pack(half, self._model)
            if place is not None and self._store.holds:
                save(network, place, made_from)
        return network

    def _pack(self, half: str, model: Network) -> FusedDecoder | FusedEncoder:
        return fuse(getattr(model, half), self._dtype, self._options, self._walk.operands(half), self._device)


class FusedHalf:
    """A packed component as clips go through it (execution/clip.py)."""

    def __init__(
        self, network: FusedDecoder | FusedEncoder, program: Program, runs: Runs, architecture: Architecture,
        options: Options, scale: float, device: torch.device,
    ) -> None:  # fmt: skip
        self.program = program
        self.spatial, self.temporal = architecture.spatial, architecture.temporal
        self.ahead = options.overlap
        self._network = network
        self._runs = runs
        self._graphs = options.cuda_graphs
        self._scale = scale
        self._device = device
        self._reader = StagedReader(device, self.ahead)

    def whole(self, clips: Clips) -> FusedPass:
        """Return the pass over clips in whole frames."""
        network, plan, steps = self._network, clips.plan, clips.plan.steps
        parking = plan.parking and replace(plan.parking, prefetch=self.ahead)
        size, ends = (steps.latents, clips.height, clips.width, steps.frames), {}
        clip = clips.latents if network.gathers else 0
        if isinstance(network, FusedDecoder):
            size = *size, clips.dtype, self._device
            if network.gathers:
                ends["before"] = functools.partial(_spread, network)

            def step(run: Run, z: Tensor, emit: Emit, ends: bool) -> None:
                network.chunk(run, z, steps.frames, clips.dtype, emit, ends)

            def replay(run: Run, z: Tensor) -> Tensor:
                return network.whole_chunk(run, steps.frames, clips.dtype, z)
        else:
            size = *size, self._device
            if network.gathers:
                ends["after"] = functools.partial(_collect, network, clips)

            def step(run: Run, video: Tensor, emit: Emit, ends: bool) -> None:
                moments = network.chunk(run, video, steps.frames)
                if not run.dry and moments is not None:
                    emit(moments)

            def replay(run: Run, video: Tensor) -> Tensor:
                return network.chunk(run, video, steps.frames)

        load = self._latents if isinstance(network, FusedDecoder) else self._video
        return FusedPass(
            network, clips,
            lambda: self._runs.run(
                lambda: network.plan(*size, parking, clip), network,
                (*size, clip, version(self._device)),
                plan, clips.guard,
            ),
            load, step, replay, lambda: self._runs.aside(plan, self._device), **ends,
        )  # fmt: skip

    def low(self, clips: Clips) -> FusedPass:
        """Return the pass through a decoder's first part, before its tiles, in whole frames and without graphs."""
        self._runs.no_graphs = why_none(self._graphs, clips.plan, self._runs.rate)
        network, steps = self._network, clips.plan.steps
        whole = clips.latents if network.gathers else steps.latents
        run = network.plan_front(whole, clips.height, clips.width, self._device)
        front, alone = slice(network.front), self._alone(run, clips)

        def step(run: Run, z: Tensor, emit: Emit, ends: bool) -> None:
            if not network.gathers:
                network.front_chunk(run, z, emit)
            elif z.shape[0] == clips.latents:  # the first part is the whole clip
                network.front_chunk(run, z, functools.partial(_in_parts, steps, emit))

        before = (lambda run, z, part: z) if network.gathers else None
        return FusedPass(network, clips, alone, self._latents, step, steps=front, before=before)

    def tile(self, clips: Clips) -> FusedPass:
        """Return the pass through a decoder's part in blended tiles, without graphs."""
        grid, steps, network = clips.plan.grid, clips.plan.steps, self._network
        run = network.plan_tile(steps.latents, grid.rows.size, grid.cols.size, steps.frames, self._device)

        def step(run: Run, x: Tensor, emit: Emit, ends: bool) -> None:
            network.tile_chunk(run, x, steps.frames, emit)

        behind = slice(network.front, None)
        return FusedPass(network, clips, self._alone(run, clips), self._features, step, steps=behind)

    def _alone(self, run: Run, clips: Clips) -> Callable[[], AbstractContextManager[tuple[Run, None]]]:
        """Return the memory of a run without graphs."""

        @contextmanager
        def memory() -> Iterator[tuple[Run, None]]:
            with allocated(run, clips.guard):
                yield run, None

        return memory

    def _latents(self, part: Tensor) -> Tensor:
        """Read latents [C, n, h, w] as [n, h, w, C] float32 on the device, unscaled."""
        return self._reader.read(part).permute(1, 2, 3, 0).float() / self._scale

    def _video(self, part: Tensor) -> Tensor:
        """Read frames [F, H, W, 3] as -1..1 on the device."""
        return to_unit(self._reader.read(part))

    def _features(self, part: Tensor) -> Tensor:
        """Copy the part, because `tile_chunk` overwrites it."""
        return torch.empty(part.shape, dtype=part.dtype, device=self._device).copy_(part)


def _spread(network: FusedDecoder, run: Run, z: Tensor, part: Part) -> Tensor:
    """Return the features of a part. z: its latents, or with the first part those of the whole clip."""
    if part.first == 0:
        network.gather(run, z)
    return run.gathered[part.first : part.end]


def _collect(network: FusedEncoder, clips: Clips, run: Run, features: Tensor, part: Part, emit: Emit) -> None:
    """Store a part's features with those of the clip; with the last part emit all moments of the clip."""
    run.gathered[part.first : part.end].copy_(features)
    if part.end == clips.latents:
        network.gather(run, functools.partial(_in_parts, clips.plan.steps, emit))


def _in_parts(steps: Steps, emit: Emit, results: Tensor) -> None:
    """Emit a clip's results chunk by chunk."""
    for first, end in steps.spans(len(results)):
        emit(results[first:end])


class PlainHalves:
    """The plain components of one model, run in `dtype`. A component whose weights wait in host memory runs as a copy
    with the weights on the device, made at its first use and kept for the next run until `release`: before the
    component runs fused, or with the packed weights."""

    def __init__(self, model: Network, architecture: Architecture, dtype: torch.dtype, options: Options) -> None:
        self._model = model
        self._architecture = architecture
        self._dtype = dtype
        self._last = options.channels_last_3d is True
        self._copies: dict[str, Half] = {}

    @property
    def layout(self) -> str:
        """Return the layout of the convolutions' weights, as the options ask for; it decides that of their inputs."""
        return "NDHWC" if self._last else "NCDHW"

    def there(self, name: str, device: torch.device) -> Half:
        """Return "encoder" or "decoder" with its weights on the device."""
        own = getattr(self._model, name)
        half = self._copies.get(name) or lent(device, *own.everything())[0]
        if half is not own:
            self._copies[name] = half
        layout = torch.channels_last_3d if self._last else torch.contiguous_format
        for module in (m for part in half.everything() if isinstance(part, nn.Module) for m in part.modules()):
            if isinstance(module, nn.Conv3d) and not module.weight.is_contiguous(memory_format=layout):
                module.to(memory_format=layout)
        return half

    def nbytes(self, name: str) -> int:
        """Return the bytes of the copy of "encoder" or "decoder"."""
        return moving_bytes(*self._copies[name].everything()) if name in self._copies else 0

    def gaps(self, name: str) -> int:
        """Return the bytes that torch reserves for the copy of "encoder" or "decoder" in addition to its own."""
        sizes = moving(*self._copies[name].everything()) if name in self._copies else []
        return reserved_for(sizes) - sum(sizes)

    def release(self, keep: str = "") -> int:
        """Free the copies, except that of the component `keep`; return their bytes."""
        gone = [name for name in self._copies if name != keep]
        freed = sum(map(self.nbytes, gone))
        for name in gone:
            del self._copies[name]
        return freed

    def half(self, name: str, scale: float, device: torch.device, seed: int | None = None) -> PlainHalf:
        """Return "encoder" or "decoder" for clips. scale: latents are divided by it. seed: of noise within the
        network."""
        a = self._architecture
        return PlainHalf(self.there(name, device), a.spatial, a.temporal, scale, self._dtype, device, seed)

    def frames(
        self, z: Tensor, steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[Iterator[Tensor]]:
        """Decode the network's latents [B, C, T, h, w]; yield per chunk its frames [B, 3, f, H, W], as `decode_frames`
        does."""
        half = self.there("decoder", device)
        parts = (part.to(device, self._dtype) for part in z.split(steps.latents or z.shape[2], 2))
        return decode_frames(half, decode_features(half, parts, check), steps, check)

    def moments(
        self, video: Iterator[Tensor], steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[Tensor]:
        """Encode frame chunks [B, 3, f, H, W] in -1..1; yield moments [B, 2C, n, h, w] chunk by chunk."""
        half = self.there("encoder", device)
        parts = (part.to(device, half.input_type(self._dtype)) for part in video)
        return encode_moments(half, encode_features(half, parts, steps, check), check)
