"""A model on the fused operators: its packed weights, and runs of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .network.fused import FusedDecoder, FusedEncoder, fuse
from .network.plain import Network
from .planning.fused_walk import FusedWalk
from .precision.policy import Policy
from .precision.prepared import load, moved, recipe, save
from .precision.store import Store
from .run.caches import empty_device_cache
from .run.graph_rule import chunks_left
from .run.graphs import why_none
from .run.guard import Guard
from .run.handover import take_over
from .run.parking import Parking
from .run.pixels import PixelSink, StagedReader, StagedWriter, to_unit
from .run.reuse import Runs, allocated
from .run.run import Run

if TYPE_CHECKING:
    from .run.plan import Plan, Steps


class FusedPath:
    """The fused halves of one model: packed when first used, dropped by `release`."""

    def __init__(self, model: Network, walk: FusedWalk, store: Store | None = None) -> None:
        """walk: what plans follow; `use` changes it too. store: where packed 8-bit weights are kept."""
        self._model = model
        self._walk = walk
        self._architecture = walk.architecture
        self._dtype = walk.dtype
        self._options = walk.options
        self._store = store or Store(None)
        self._packed: dict[str, FusedDecoder | FusedEncoder] = {}
        self.runs = Runs(walk.options.cuda_graphs)

    def decoder(self) -> FusedDecoder:
        return self._get("decoder")  # type: ignore[return-value]

    def encoder(self) -> FusedEncoder:
        return self._get("encoder")  # type: ignore[return-value]

    def use(self, half: str, policy: Policy) -> None:
        """Pack and plan "encoder" or "decoder" for these operands from now on."""
        if self._walk.use(half, policy):
            self._packed.pop(half, None)
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
        """Bytes of the packed weights now held for "encoder" or "decoder"; plans count them too."""
        return self._packed[half].nbytes if half in self._packed else 0

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

    def _prepared(self, half: str) -> FusedDecoder | FusedEncoder:
        """8-bit weights from the store, where they have been packed before; 16-bit ones cost less to pack than read."""
        if not self._walk.operands(half).policy.kinds:
            return self._pack(half, self._model)
        options, place = self._options, self._store.prepared(half)
        made_from = recipe(self._walk.operands(half), options.composed_upsample, options.flash_attention)
        device = next(getattr(self._model, half).parameters()).device
        network = None if place is None else load(self._walk.network(half), place, made_from, device)
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

    def _pack(self, half: str, model: Network) -> FusedDecoder | FusedEncoder:
        return fuse(getattr(model, half), self._dtype, self._options, self._walk.operands(half))

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


def _chunks(z: Tensor, steps: Steps, scale: float, reader: StagedReader, run: Run) -> Iterator[Tensor]:
    """[C, T, h, w] -> [D, h, w, C] float32 on the device, unscaled."""

    def read(part: Tensor) -> Tensor:
        return reader.read(part).permute(1, 2, 3, 0).float() / scale

    for part in z.split(steps.latents, 1):
        yield run.attempt(read, part)
