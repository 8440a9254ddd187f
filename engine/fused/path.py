"""Whether the fused operators can run a model here, and if so, their weights, plans and runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..kernels.attention import reference
from ..kernels.conv3d import padded_channels
from ..kernels.targets import target
from ..precision.operands import Operands
from ..precision.policy import EXACT, Policy
from ..precision.prepared import load, recipe, save
from ..precision.store import Store
from ..runtime.dryrun import peak_bytes
from ..runtime.pixels import PixelSink, StagedReader, StagedWriter, to_unit
from ..runtime.progress import Ticker
from .decoder import FusedDecoder
from .encoder import FusedEncoder
from .parking import Parking
from .placement import Sizes
from .run import Run

if TYPE_CHECKING:
    from ..optimize import Options
    from ..runtime.plan import Plan
    from ..runtime.stream import Steps

#: Partial sums and coefficients, which operators allocate themselves (33 MiB at 3840x2160).
TEMPORARY_BYTES = 64 << 20
#: Full-size pixels per step that fill a GPU. At 1280x720, one frame per step is as fast as eight (H200).
STEP_PIXELS = 1 << 20


def why_off(
    architecture: str, config: object, dtype: torch.dtype, device: torch.device, emulate: bool = False
) -> str | None:
    """The reason the fused operators cannot run this model on this device, or None.

    emulate: on a CPU their references will do, for numbers that plain torch cannot give.
    """
    if architecture != "seedvr2":
        return f"no fused network for {architecture}"
    here = target(device)
    if not (emulate and device.type == "cpu"):
        if not here.kernels:
            return here.notes[0] if here.notes else f"no kernels for {device}"
        if not here.supports(dtype):
            return f"no fused kernels for {dtype}: plain torch keeps its precision"
    widths = {*(getattr(config, "encoder_widths", None) or ()), *(getattr(config, "decoder_widths", None) or ())}
    odd = sorted(w for w in widths if padded_channels(w, dtype) != w)
    if odd:
        return f"widths {odd} are no multiples of {padded_channels(1, dtype)}"
    return None


class FusedPath:
    """The fused halves of one model: packed when first used, dropped by `release`."""

    def __init__(
        self, model: nn.Module, build: Callable[[], nn.Module], dtype: torch.dtype, options: Options,
        store: Store | None = None,
    ) -> None:
        """`build` makes the model on the meta device, for plans. store: where packed 8-bit weights are kept."""
        self._model = model
        self._build = build
        self._dtype = dtype
        self._options = options
        self._store = store or Store(None)
        self._policies: dict[str, Policy] = {}
        self._packed: dict[str, FusedDecoder | FusedEncoder] = {}
        self._sizes = functools.lru_cache(maxsize=1024)(self._dry_run)

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

    def release(self) -> None:
        """Give the packed weights back; the next use packs anew (0.15 s for the published decoder on an H200)."""
        self._packed.clear()

    def packed_bytes(self, half: str) -> int:
        """Bytes of the packed weights now held for "encoder" or "decoder"; `sizes` counts them too."""
        return self._packed[half].nbytes if half in self._packed else 0

    def frames_per_step(self, height: int, width: int) -> int:
        """Frames at full size that make one well-filled step, for a frame of this many pixels."""
        return max(1, STEP_PIXELS // (height * width))

    def sizes(
        self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype,
        frame: tuple[int, int] | None = None, parking: Parking | None = None,
    ) -> Sizes:
        """What a run takes besides the plain weights, for `latents` and `frames` per step.

        height, width: of the frame or tile, in latent pixels; frame: the whole frame's, where that is a tile.
        """
        return self._sizes(half, latents, frames, height, width, output, frame, parking)

    # -- runs, clip by clip through one set of buffers ---------------------------------------------------------------

    def decode(
        self, z: Tensor, scale: float, plan: Plan, sink: PixelSink, tick: Ticker, device: torch.device
    ) -> None:
        """Latents [B, C, T, h, w], divided by `scale`, into the sink's frames."""
        decoder, steps, out = self.decoder(), plan.steps, sink.out
        parking, ahead = self._parking(plan), self._options.async_offload
        run = decoder.plan(steps.latents, z.shape[3], z.shape[4], steps.frames, out.dtype, device, parking)
        reader = StagedReader(device, ahead)
        with allocated(run), StagedWriter(out, steps.frames, device, ahead) as writer:
            for clip in range(z.shape[0]):
                run.restart()

                def emit(pixels: Tensor, clip: int = clip) -> None:
                    writer.write(clip, run.done["frames"] - pixels.shape[0], pixels)
                    tick.check()

                for part in _chunks(z[clip], steps, scale, reader):
                    tick.check()
                    walk = functools.partial(decoder.chunk, run, part, steps.frames, out.dtype, emit)
                    run.scout(walk)
                    walk()
                    tick.advance()

    def decode_tiles(
        self, z: Tensor, scale: float, plan: Plan, sink: PixelSink, tick: Ticker, device: torch.device
    ) -> None:
        """As `decode` in blended tiles: the front runs untiled, its features wait in host memory; then tile by tile."""
        decoder, steps = self.decoder(), plan.steps
        front = decoder.plan_front(steps.latents, z.shape[3], z.shape[4], device)
        tile = decoder.plan_tile(steps.latents, plan.grid.rows.size, plan.grid.cols.size, steps.frames, device)
        reader = StagedReader(device, self._options.async_offload)
        for clip in range(z.shape[0]):
            features: list[Tensor] = []
            with allocated(front):
                for part in _chunks(z[clip], steps, scale, reader):
                    tick.check()
                    decoder.front_chunk(front, part, lambda x: features.append(x.cpu()))  # noqa: B023 - called at once
                    tick.advance()
            with allocated(tile):
                for where in plan.grid.indices():
                    self._decode_tile(tile, features, clip, where, plan, sink, tick)

    def _decode_tile(
        self, run: Run, features: list[Tensor], clip: int, where: tuple[int, int], plan: Plan, sink: PixelSink,
        tick: Ticker,
    ) -> None:
        rows, cols = plan.grid.rows, plan.grid.cols
        (y0, y1), (x0, x1) = rows.spans()[where[0]], cols.spans()[where[1]]
        weight = (rows.weights(where[0], 8)[:, None] * cols.weights(where[1], 8)[None, :]).to(run.device)

        def emit(pixels: Tensor) -> None:
            sink.add_pixels(clip, run.done["frames"] - pixels.shape[0], 8 * y0, 8 * x0, pixels, weight)
            tick.check()

        run.restart()
        for part in features:
            tick.check()
            crop = part[:, y0:y1, x0:x1].to(run.device).contiguous()
            self.decoder().tile_chunk(run, crop, plan.steps.frames, emit)
            tick.advance()

    def encode(
        self, video: Tensor, spans: list[tuple[int, int]], plan: Plan, out: Tensor, tick: Ticker, device: torch.device
    ) -> None:
        """Frames [B, F, H, W, 3] in 0..1 (or bytes), chunked as `spans`, into moments out [B, 2C, T, h, w]."""
        encoder, steps = self.encoder(), plan.steps
        parking, ahead = self._parking(plan), self._options.async_offload
        run = encoder.plan(steps.latents, video.shape[2], video.shape[3], steps.frames, device, parking)
        reader = StagedReader(device, ahead)
        with allocated(run), StagedWriter(out.permute(0, 2, 3, 4, 1), steps.latents, device, ahead) as writer:
            for clip in range(video.shape[0]):
                run.restart()
                first = 0
                for a, b in spans:
                    tick.check()
                    frames = to_unit(reader.read(video[clip, a:b]))
                    walk = functools.partial(encoder.chunk, run, frames, steps.frames)
                    run.scout(walk)
                    moments = walk()
                    writer.write(clip, first, moments)
                    first += moments.shape[0]
                    tick.advance()

    def _parking(self, plan: Plan) -> Parking | None:
        return plan.parking and replace(plan.parking, prefetch=self._options.async_offload)

    def _get(self, half: str) -> FusedDecoder | FusedEncoder:
        if half not in self._packed:
            self._packed[half] = self._prepared(half)
            if self._packed[half].norm_out.weight.is_cuda:
                torch.cuda.empty_cache()  # packing goes through fp32: 0.2 GB that would stay reserved
        return self._packed[half]

    @functools.cached_property
    def _meta(self) -> dict[str, FusedDecoder | FusedEncoder]:
        with torch.device("meta"), torch.no_grad():
            model = self._build()
            halves = [h for h in ("encoder", "decoder") if getattr(model, h) is not None]
            return {h: self._pack(h, model) for h in halves}

    def _prepared(self, half: str) -> FusedDecoder | FusedEncoder:
        """8-bit weights from the store, where they have been packed before; 16-bit ones cost less to pack than read."""
        place = self._store.prepared(half) if self._policies.get(half, EXACT).kinds else None
        if place is None:
            return self._pack(half, self._model)
        options = self._options
        made_from = recipe(self._operands(half), options.composed_upsample, options.flash_attention)
        device = next(getattr(self._model, half).parameters()).device
        network = load(self._meta[half], place, made_from, device)
        if network is None:
            network = self._pack(half, self._model)
            save(network, place, made_from)
        return network

    def _pack(self, half: str, model: nn.Module) -> FusedDecoder | FusedEncoder:
        network = FusedDecoder if half == "decoder" else FusedEncoder
        return network(getattr(model, half), self._dtype, self._options, self._operands(half))

    def _operands(self, half: str) -> Operands:
        return Operands(self._dtype, self._policies.get(half, EXACT))

    def _dry_run(
        self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype,
        frame: tuple[int, int] | None, parking: Parking | None,
    ) -> Sizes:
        network, meta = self._meta[half], torch.device("meta")
        besides = network.nbytes + TEMPORARY_BYTES
        if isinstance(network, FusedEncoder):
            run = network.plan(latents, 8 * height, 8 * width, frames, meta, parking)
            # Three chunks' frames as they arrive ahead of their turn, and two copies on the way in, all in float32.
            besides += 5 * 4 * latents * 64 * height * width * 3 * 4
        elif frame is None:
            run = network.plan(latents, height, width, frames, output, meta, parking)
        else:
            # Front and tiles run one after the other.
            front = network.plan_front(latents, *frame, meta)
            run = max(front, network.plan_tile(latents, height, width, frames, meta), key=lambda r: r.nbytes)
        if not self._options.flash_attention:
            tokens = math.prod(frame or (height, width))
            besides += _plain_attention_bytes(tokens, network.attention.norm.weight.numel(), self._dtype)
        sizes = Sizes.of(run)
        return replace(sizes, device=sizes.device + besides)


@contextmanager
def allocated(run: Run) -> Iterator[None]:
    """The run's memory, given back whatever happens."""
    try:
        run.allocate()
        yield
    finally:
        run.free()


def _plain_attention_bytes(tokens: int, channels: int, dtype: torch.dtype) -> int:
    q, k, v = torch.empty(3, 1, tokens, channels, dtype=dtype, device="meta")
    return peak_bytes(lambda: reference.attention(q, k, v))


def _chunks(z: Tensor, steps: Steps, scale: float, reader: StagedReader) -> Iterator[Tensor]:
    """[C, T, h, w] -> [D, h, w, C] float32 on the device, unscaled."""
    for part in z.split(steps.latents, 1):
        yield reader.read(part).permute(1, 2, 3, 0).float() / scale

