"""Whether the fused operators can run a model here, and if so, their weights, plans and runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .archs import Architecture, by_name
from .kernels.attention import reference
from .kernels.conv3d import padded_channels
from .kernels.probe import proven
from .kernels.targets import target
from .network.fused import FusedDecoder, FusedEncoder, fuse
from .network.plain import Network
from .network.program import Program
from .planning.cost import Sizes
from .planning.dryrun import peak_bytes
from .precision.operands import Operands
from .precision.policy import EXACT, Policy
from .precision.prepared import load, moved, recipe, save
from .precision.store import Store
from .run.caches import empty_device_cache
from .run.graph_rule import chunks_left
from .run.graphs import GRAPH_BYTES, one_step, why_none
from .run.guard import Guard
from .run.handover import take_over
from .run.parking import Parking
from .run.pixels import PixelSink, StagedReader, StagedWriter, to_unit
from .run.reuse import Runs, allocated
from .run.run import RESERVE_BYTES, Run

if TYPE_CHECKING:
    from .network.stream import Steps
    from .options import Options
    from .planning.planner import Plan

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

    # -- runs, clip by clip through one set of buffers ---------------------------------------------------------------

    def decode(
        self, z: Tensor, scale: float, plan: Plan, sink: PixelSink, guard: Guard, device: torch.device
    ) -> None:
        """Latents [B, C, T, h, w], divided by `scale`, into the sink's frames."""
        decoder, steps, out = self.decoder(), plan.steps, sink.out
        parking, ahead = self._parking(plan), self._options.async_offload
        size = steps.latents, z.shape[3], z.shape[4], steps.frames, out.dtype, device
        reader = StagedReader(device, ahead)
        with (
            self.runs.run(lambda: decoder.plan(*size, parking), decoder, size, plan, guard) as (run, graphs),
            StagedWriter(out, steps.frames, device, guard.finish, ahead) as writer,
        ):
            whole = functools.partial(decoder.whole_chunk, run, steps.frames, out.dtype)
            for clip in _unfinished(guard, out):

                def emit(pixels: Tensor, clip: int = clip) -> None:
                    first, count = run.done["frames"] - pixels.shape[0], pixels.shape[0]
                    done = guard.skip(clip, first, count)
                    if done < count:
                        writer.write(clip, first + done, pixels[done:], run.health)
                    guard.tick.check()

                _begin(run, clip, guard)
                for part in _chunks(z[clip][:, run.done["latents"] :], steps, scale, reader, run):
                    guard.tick.check()
                    walk = functools.partial(decoder.chunk, run, part, steps.frames, out.dtype, emit)
                    run.scout(walk)
                    with run.chunk():
                        if graphs is None:
                            walk()
                        else:
                            left = chunks_left(z.shape[0] - clip - 1, z.shape[2], run.done["latents"], part.shape[0])
                            emit(graphs.chunk(whole, part, left))
                    guard.reach(clip * z.shape[2] + run.done["latents"])
                    if run.pressed:
                        guard.settle(run.recover)

    def decode_tiles(
        self, z: Tensor, scale: float, plan: Plan, sink: PixelSink, guard: Guard, device: torch.device
    ) -> None:
        """As `decode` in blended tiles: the front runs untiled, its features wait in host memory; then tile by tile."""
        decoder, steps, latents, t = self.decoder(), plan.steps, z.shape[2], self._architecture.temporal
        self.runs.no_graphs = why_none(self._options.cuda_graphs, plan)
        front = decoder.plan_front(steps.latents, z.shape[3], z.shape[4], device)
        tile = decoder.plan_tile(steps.latents, plan.grid.rows.size, plan.grid.cols.size, steps.frames, device)
        reader = StagedReader(device, self._options.async_offload)
        for clip in range(z.shape[0]):
            before = clip * latents * (len(plan.grid) + 1)
            features: list[Tensor] = []
            with allocated(front, guard):
                for part in _chunks(z[clip], steps, scale, reader, front):
                    guard.tick.check()
                    decoder.front_chunk(front, part, lambda x: features.append(x.to("cpu", copy=True)))  # noqa: B023
                    through = sum(map(len, features))
                    first, end = (max(0, t * (n - 1) + 1) for n in (through - part.shape[0], through))
                    guard.inspect(clip, first, end - first, float(front.health))
                    guard.reach(before + through)
            with allocated(tile, guard):
                for index, where in enumerate(plan.grid.indices(), 1):
                    if guard.finished[(clip, *where)] < sink.out.shape[1]:
                        self._decode_tile(tile, features, clip, where, plan, sink, guard, before + index * latents)

    def _decode_tile(
        self, run: Run, features: list[Tensor], clip: int, where: tuple[int, int], plan: Plan, sink: PixelSink,
        guard: Guard, before: int,
    ) -> None:
        rows, cols, s = plan.grid.rows, plan.grid.cols, self._architecture.spatial
        (y0, y1), (x0, x1) = rows.spans()[where[0]], cols.spans()[where[1]]
        weight = (rows.weights(where[0], s)[:, None] * cols.weights(where[1], s)[None, :]).to(run.device)
        name = (clip, *where)

        def emit(pixels: Tensor) -> None:
            first, count = run.done["frames"] - pixels.shape[0], pixels.shape[0]
            done = guard.skip(name, first, count)
            if done < count:
                guard.inspect(name, first, count, float(run.health))
                sink.add_pixels(clip, first + done, s * y0, s * x0, pixels[done:], weight)
                guard.finish(name, first, count)
            guard.tick.check()

        run.restart()
        for part in features:
            guard.tick.check()
            crop = part[:, y0:y1, x0:x1]
            tile = torch.empty(crop.shape, dtype=crop.dtype, device=run.device).copy_(crop)
            self.decoder().tile_chunk(run, tile, plan.steps.frames, emit)
            guard.reach(before + run.done["latents"])

    def encode(self, video: Tensor, plan: Plan, out: Tensor, guard: Guard, device: torch.device) -> None:
        """Frames [B, F, H, W, 3] in 0..1 (or bytes) into moments out [B, 2C, T, h, w]."""
        encoder, steps = self.encoder(), plan.steps
        parking, ahead = self._parking(plan), self._options.async_offload
        size = steps.latents, video.shape[2], video.shape[3], steps.frames, device
        reader, out = StagedReader(device, ahead), out.permute(0, 2, 3, 4, 1)
        count = 4 * (out.shape[1] - 1) + 1
        with (
            self.runs.run(lambda: encoder.plan(*size, parking), encoder, size, plan, guard) as (run, graphs),
            StagedWriter(out, steps.latents, device, guard.finish, ahead) as writer,
        ):
            whole = functools.partial(encoder.chunk, run, frames=steps.frames)

            def read(part: Tensor) -> Tensor:
                return to_unit(reader.read(part))

            for clip in _unfinished(guard, out):
                _begin(run, clip, guard)
                while run.done["frames"] < count:
                    guard.tick.check()
                    a, first = run.done["frames"], -(-run.done["frames"] // 4)
                    b = min(4 * (first + steps.latents - 1) + 1, count)
                    frames = run.attempt(read, video[clip, a:b])
                    run.scout(functools.partial(whole, frames))
                    with run.chunk():
                        if graphs is None:
                            moments = whole(frames)
                        else:
                            left = chunks_left(out.shape[0] - clip - 1, out.shape[1], first, -(-(b - a) // 4))
                            moments = graphs.chunk(whole, frames, left)
                    done = guard.skip(clip, first, moments.shape[0])
                    if done < moments.shape[0]:
                        writer.write(clip, first + done, moments[done:], run.health)
                    guard.reach(clip * out.shape[1] + first + moments.shape[0])
                    if run.pressed:
                        guard.settle(run.recover)

    def _parking(self, plan: Plan) -> Parking | None:
        return plan.parking and replace(plan.parking, prefetch=self._options.async_offload)

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


def _unfinished(guard: Guard, out: Tensor) -> Iterator[int]:
    """Clips of [B, frames, ...] that are not finished."""
    return (clip for clip in range(out.shape[0]) if guard.finished[clip] < out.shape[1])


def _begin(run: Run, clip: int, guard: Guard) -> None:
    """The clip's start, or where an attempt before left it."""
    begun = guard.taken_over(clip)
    if begun is None:
        run.restart()
    else:
        take_over(run, begun)


def _plain_attention_bytes(tokens: int, channels: int, dtype: torch.dtype) -> int:
    q, k, v = torch.empty(3, 1, tokens, channels, dtype=dtype, device="meta")
    return peak_bytes(lambda: reference.attention(q, k, v))


def _chunks(z: Tensor, steps: Steps, scale: float, reader: StagedReader, run: Run) -> Iterator[Tensor]:
    """[C, T, h, w] -> [D, h, w, C] float32 on the device, unscaled."""

    def read(part: Tensor) -> Tensor:
        return reader.read(part).permute(1, 2, 3, 0).float() / scale

    for part in z.split(steps.latents, 1):
        yield run.attempt(read, part)

