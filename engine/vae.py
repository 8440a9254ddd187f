"""The VAE object: decode and encode clips within a memory target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from . import log
from .errors import InputError
from .fused.path import FusedPath, why_off
from .hardware import GIB
from .kernels.targets import target
from .models.arch import Architecture
from .optimize import DEFAULTS, OFF, Options, unavailable, unused
from .precision.measure import latent_samples, video_samples
from .precision.mixed import Mixed
from .precision.modes import MIXED, resolve
from .precision.store import Store
from .report import Report
from .runtime.memory import host_budget, memory_target
from .runtime.pixels import OUTPUTS, PixelSink, to_network, to_unit
from .runtime.plan import Plan, Planner
from .runtime.progress import Cancel, Progress, Ticker
from .runtime.scope import scoped_math
from .runtime.stream import Steps, decode_features, decode_frames, encode_features, encode_moments, frame_spans


class VideoVAE:
    """A loaded video VAE.

    Latents of `decode` and `encode` are host-scaled (the network's times `scale`), those of the `_raw` pair are the
    network's own. Results lie in host memory. Memory options are in GB (2^30); 0 means automatic.
    """

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        precision: str,
        dtype: torch.dtype,
        device: torch.device,
        path: Path | None = None,
        asked: str | None = None,
    ) -> None:
        """precision: the name of `dtype`. asked: the precision as the user named it, such as "auto" or "fp8"."""
        self._asked = asked or precision
        self.store = Store(path)
        self.model = model
        self.architecture = architecture
        self.arch = architecture.name
        self._float = precision
        self.dtype = dtype
        self.device = device
        self.path = path
        self.latent_channels: int = model.config.latent_channels
        self.spatial = architecture.spatial
        self.temporal = architecture.temporal
        self.scale = architecture.scale
        #: What the latest decode or encode did, filled from its start on; None before the first.
        self.last_report: Report | None = None
        self._use(DEFAULTS)

    def _use(self, options: Options) -> None:
        """Set the options, with packed weights and plans made for them."""
        self._options = options
        model, dtype = self.model, self.dtype

        def build() -> nn.Module:
            return self.architecture.build(model.config)

        self._fused = FusedPath(model, build, dtype, options, self.store)
        self._mixed = self._mode_of(options)
        for half in ("encoder", "decoder"):
            if getattr(model, half) is not None:
                self._fused.use(half, self._mixed.policy(half))
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self.planner = Planner(
            build, dtype, weights, self.fused, self.spatial, self.temporal, options.flash_attention
        )

    def _mode_of(self, options: Options) -> Mixed:
        asked = self._asked
        if options.fp8 and not options.min_db and asked not in MIXED:
            asked = "fp8"
        mode = resolve(asked, self.device, options.min_db, self._kernels_off(emulate=True), self._float)
        if mode.refused:
            log.once(mode.refused)
        elif mode.kind and self.device.type == "cpu":
            log.once(f"{mode.kind} on a CPU: the same numbers as on a GPU, but slower than fp32")
        return Mixed(mode, self.model, self.dtype, options, self.store)

    @property
    def precision(self) -> str:
        """What it computes in: "fp32", "bf16", "fp16", or one of `MIXED` where this machine runs that."""
        mode = self._mixed.mode
        return mode.kind or ("fp16_fast" if mode.half_accumulate else self._float)

    @property
    def options(self) -> Options:
        """The optimisations it may use. Assigning others drops packed weights and plans, which depend on them."""
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        if options != self._options:
            self._use(options)

    @property
    def triton_fusion(self) -> bool:
        """`options.triton_fusion`; off runs the plain torch modules instead of the fused kernels."""
        return self._options.triton_fusion

    @triton_fusion.setter
    def triton_fusion(self, on: bool) -> None:
        self.options = self._options.switched(**{"on" if on else "off": ["triton_fusion"]})

    def with_options(self, options: Options) -> VideoVAE:
        """A VAE with the same weights (shared, not copied) under other options; this one stays as it is."""
        other = copy.copy(self)
        other.last_report = None
        other._use(options)
        return other

    @property
    def can_decode(self) -> bool:
        return self.model.decoder is not None

    @property
    def can_encode(self) -> bool:
        return self.model.encoder is not None

    def to(self, device: torch.device | str) -> VideoVAE:
        """Move the weights to where the runs will be; returns self."""
        if torch.device(device) != self.device:
            self.release()
            self.device = torch.device(device)
            mixed = self._mode_of(self._options)
            if mixed.mode != self._mixed.mode:
                self._use(self._options)
        self.model.to(self.device)
        return self

    def fused(self) -> FusedPath | None:
        """The fused kernels, or None where they are switched off or cannot run; the reason is logged once."""
        reason = self._kernels_off(emulate=self._mixed.mode.kind is not None)
        if reason:
            if self.device.type == "cuda":
                log.once(f"fused kernels off: {reason}")
            return None
        return self._fused

    def _kernels_off(self, emulate: bool = False) -> str | None:
        if not self._options.triton_fusion:
            return OFF
        if self._options.channels_last_3d is False:
            return "channels_last_3d is switched off, and they know no other layout"
        return why_off(self.arch, self.model.config, self.dtype, self.device, emulate)

    def _settle(self, half: str, samples: Callable[[], list[Tensor]]) -> None:
        """Choose the operands of a half for a clip, before it is planned."""
        with torch.no_grad(), self._scope():
            self._fused.use(half, self._mixed.settle(half, samples))

    def release(self) -> None:
        """Give back the memory that only makes the next run start sooner (packed weights)."""
        self._fused.release()

    def frames(self, latents: int) -> int:
        """Frames that `latents` decode to."""
        return self.temporal * (latents - 1) + 1

    def _held(self, half: str) -> int:
        """Bytes of this VAE already on its device that a plan for `half` counts: they are not foreign."""
        here = (p for p in self.model.parameters() if p.device.type == self.device.type)
        return sum(p.numel() * p.element_size() for p in here) + self._fused.packed_bytes(half)

    # -- one run --------------------------------------------------------------------------------------------------

    def _scope(self) -> AbstractContextManager[None]:
        """torch's settings as the options want them, for the time of a run."""
        o = self._options
        return scoped_math(
            self.device, tf32=o.tf32, cudnn_benchmark=o.cudnn_benchmark, flash_attention=o.flash_attention
        )

    def _begin(self, operation: str, clip: tuple[int, int, int, int]) -> Report:
        """The report of a run that starts; clip: batch, frames, height and width in pixels."""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        self.last_report = Report(operation, clip, self.arch, self.precision, f"{self.device}{name}")
        return self.last_report

    def _describe(self, report: Report, plan: Plan) -> None:
        """What the report says of a run before it starts; sets the plain modules' layout."""
        layout = "NDHWC" if plan.fused else self._set_layout()
        if layout == "NDHWC":
            log.once("Channels_Last_3D Memory Format Applied.", log.info)
        if plan.fused and self.device.type == "cuda":
            log.once("Triton kernel fusion enabled for GroupNorm + SiLU.", log.info)
        report.mode = f"fused kernels ({layout})" if plan.fused else f"plain torch ({layout})"
        report.plan = plan.describe()
        report.predicted_gb = plan.peak_bytes / GIB
        reasons = unavailable(self.device, self.dtype, why_off(self.arch, self.model.config, self.dtype, self.device))
        off = unused(self._options, reasons, self.dtype, plan.fused)
        half = "decoder" if report.operation == "decode" else "encoder"
        if self._mixed.mode.kind and plan.fused:
            off.pop("fp8", None)
            if self.device.type == "cpu":
                report.mode = f"fused network on the reference operators ({layout})"
                off.pop("composed_upsample", None)
            report.operands = self._mixed.describe(half)
            self._mixed.note(report, half)
        if self._mixed.mode.refused:
            off[self._asked if self._asked in MIXED else "fp8"] = self._mixed.mode.refused
        if plan.fused and self.device.type == "cuda" and "fp8" in self._mixed.policy(half).kinds.values():
            log.once(f"sm_{target(self.device).sm} FP8 Path Activated.", log.info)
        report.off = list(off.items())

    def _set_layout(self) -> str:
        """Give the plain convolutions' weights the layout that the options ask for; theirs decides their inputs'."""
        last = self._options.channels_last_3d is True
        layout = torch.channels_last_3d if last else torch.contiguous_format
        for module in self.model.modules():
            if isinstance(module, nn.Conv3d) and not module.weight.is_contiguous(memory_format=layout):
                module.to(memory_format=layout)
        return "NDHWC" if last else "NCDHW"

    # -- decode ---------------------------------------------------------------------------------------------------

    def plan_decode(
        self,
        batch: int,
        latents: int,
        height: int,
        width: int,
        *,
        tiling: str = "auto",
        tile: int = 0,
        overlap: int = 64,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        output: str = "float32",
    ) -> Plan:
        """The plan `decode` follows for [batch, C, latents, height, width] latents."""
        target = memory_target(self.device, vram_gb, ram_gb, self._held("decoder"))
        return self.planner.plan(
            "decoder", batch, latents, height, width,
            tiling=tiling, tile=tile, overlap=overlap, chunk=chunk, target=target,
            host=host_budget(self.device, ram_gb), output=OUTPUTS[output],
        )  # fmt: skip

    def decode(
        self,
        latent: Tensor,
        *,
        tiling: str = "auto",
        tile: int = 0,
        overlap: int = 64,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        output: str = "float32",
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Tensor:
        """Host-scaled latent [B, C, T, h, w] (or [C, T, h, w]) -> frames [B, 4(T-1)+1, s*h, s*w, 3] in 0..1.

        s: `spatial`. tiling: "auto" and "untiled" run whole frames, "exact" equals them, "blended" uses tiles of `tile`
        pixels (0: chosen for the target) sharing `overlap` pixels. chunk: latents per step. output: "float32",
        "float16" or "uint8" (0..255). progress(done, total) after each chunk; cancel() true raises Cancelled.
        Raises InputError on a wrong latent or option, PlanError when nothing fits the target.
        """
        if output not in OUTPUTS:
            raise InputError(f"output={output!r} is not one of {', '.join(OUTPUTS)}")
        z = self._check_latent(latent)
        batch, _, count, h, w = z.shape
        shape = (batch, self.frames(count), self.spatial * h, self.spatial * w, 3)
        report = self._begin("decode", shape[:4])
        with report.stage("plan"):
            self._settle("decoder", lambda: [p.to(self.device).float() / self.scale for p in latent_samples(z[0])])
            plan = self.plan_decode(
                batch, count, h, w,
                tiling=tiling, tile=tile, overlap=overlap, chunk=chunk, vram_gb=vram_gb, ram_gb=ram_gb, output=output,
            )  # fmt: skip
        self._describe(report, plan)
        log.debug(f"decode {self.spatial * w}x{self.spatial * h}, {self.frames(count)} frames: {plan.describe()}")
        sink = PixelSink(shape, OUTPUTS[output], plan.tiled)
        chunks = -(-count // plan.steps.latents)
        passes = len(plan.grid) + 1 if plan.tiled else 1
        tick = Ticker(progress, cancel, chunks * passes * (batch if plan.fused else 1))
        with report.measured(self.device), self._scope():
            with report.stage("decode"):
                if plan.fused:
                    decode = self._fused.decode_tiles if plan.tiled else self._fused.decode
                    decode(z, self.scale, plan, sink, tick, self.device)
                elif plan.tiled:
                    self._decode_tiles(z, plan, sink, tick)
                else:
                    self._decode_whole(z, plan, sink, tick)
            with report.stage("output"):
                frames = sink.finish()
        report.complete = True
        return frames

    def decode_raw(self, z: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """The network as it is: unscaled latent [B, C, T, h, w] -> [B, 3, F, H, W], not clamped, on the VAE's device.

        chunk: latents per step, frames: frames per step after the temporal upsamplers (0: all at once).
        """
        z = self._check_latent(z)
        steps = Steps(chunk, frames)
        self._set_layout()
        with self._scope():
            out = [y for part in self._stream(self._latent_chunks(z, steps, 1.0), steps, _never) for y in part]
            return torch.cat(out, 2)

    def _latent_chunks(self, z: Tensor, steps: Steps, scale: float) -> Iterator[Tensor]:
        for part in z.split(steps.latents or z.shape[2], 2):
            yield (part.to(self.device, torch.float32) / scale).to(self.dtype)

    def _stream(self, z: Iterator[Tensor], steps: Steps, check: Callable[[], None]) -> Iterator[list[Tensor]]:
        features = decode_features(self.model.decoder, z, check)
        return decode_frames(self.model.decoder, features, steps, check)

    def _decode_whole(self, z: Tensor, plan: Plan, sink: PixelSink, tick: Ticker) -> None:
        first = 0
        for frames in self._stream(self._latent_chunks(z, plan.steps, self.scale), plan.steps, tick.check):
            for piece in frames:
                sink.write(first, piece)
                first += piece.shape[2]
            tick.advance()

    def _decode_tiles(self, z: Tensor, plan: Plan, sink: PixelSink, tick: Ticker) -> None:
        """The front runs untiled for the whole clip, its features wait in host memory; then tile by tile."""
        decoder, s = self.model.decoder, self.spatial
        features = []
        for part in decode_features(decoder, self._latent_chunks(z, plan.steps, self.scale), tick.check):
            features.append(part.cpu())
            tick.advance()
        rows, cols = plan.grid.rows, plan.grid.cols
        for i, j in plan.grid.indices():
            (y0, y1), (x0, x1) = rows.spans()[i], cols.spans()[j]
            weight = (rows.weights(i, s)[:, None] * cols.weights(j, s)[None, :]).to(self.device)
            pieces = (f[..., y0:y1, x0:x1].to(self.device) for f in features)
            first = 0
            for frames in decode_frames(decoder, pieces, plan.steps, tick.check):
                for piece in frames:
                    sink.add(first, y0 * s, x0 * s, piece, weight)
                    first += piece.shape[2]
                tick.advance()

    # -- encode ---------------------------------------------------------------------------------------------------

    def plan_encode(
        self,
        batch: int,
        latents: int,
        height: int,
        width: int,
        *,
        tiling: str = "auto",
        tile: int = 0,
        overlap: int = 64,
        vram_gb: float | None = None,
    ) -> Plan:
        """The plan `encode` follows for frames that become [batch, C, latents, height, width] latents."""
        self._need_encoder()
        target = memory_target(self.device, vram_gb, None, self._held("encoder"))
        return self.planner.plan(
            "encoder", batch, latents, height, width,
            tiling=tiling, tile=tile, overlap=overlap, target=target, host=host_budget(self.device, None),
        )  # fmt: skip

    def encode(
        self,
        video: Tensor,
        *,
        tiling: str = "auto",
        tile: int = 0,
        overlap: int = 64,
        vram_gb: float | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Tensor:
        """Frames [B, F, H, W, 3] or [F, H, W, 3] in 0..1 (or uint8) -> host-scaled latent [B, C, T, H//s, W//s].

        T = (F - 1) // 4 + 1; frames beyond 4(T - 1) + 1 are not read. seed None gives the mean, a seed a sample.
        Options and errors as in `decode`.
        """
        x = self._check_video(video)
        report = self._begin("encode", x.shape[:4])
        moments = self._moments(report, x, tiling, tile, overlap, vram_gb, progress, cancel)
        with report.stage("output"):
            latent = self.model.sample(moments, seed) * self.scale
        report.complete = True
        return latent

    def encode_raw(self, x: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """The network as it is: [B, 3, F, H, W] in -1..1 -> moments [B, 2C, T, h, w], on the VAE's device.

        chunk: latents per step, frames: frames per step before the first downsampler (0: all at once).
        """
        self._need_encoder()
        if x.ndim != 5 or x.shape[1] != 3 or x.shape[2] < 1 or min(x.shape[3:]) < self.spatial:
            least = f"{self.spatial}x{self.spatial}"
            raise InputError(f"encode_raw takes [B, 3, F, H, W] of at least {least} pixels, not {list(x.shape)}")
        steps = Steps(chunk, frames)
        parts = (x[:, :, a:b].to(self.device, self.dtype) for a, b in frame_spans(x.shape[2], chunk, self.temporal))
        self._set_layout()
        with self._scope():
            features = encode_features(self.model.encoder, parts, steps, _never)
            return torch.cat(list(encode_moments(self.model.encoder, features, _never)), 2)

    def _moments(
        self,
        report: Report,
        video: Tensor,
        tiling: str,
        tile: int,
        overlap: int,
        vram_gb: float | None,
        progress: Progress | None,
        cancel: Cancel | None,
    ) -> Tensor:
        batch, count, height, width, _ = video.shape
        s, t = self.spatial, self.temporal
        latents, h, w = (count - 1) // t + 1, height // s, width // s
        with report.stage("plan"):
            self._settle("encoder", lambda: [to_unit(p.to(self.device)) for p in video_samples(video[0])])
            plan = self.plan_encode(batch, latents, h, w, tiling=tiling, tile=tile, overlap=overlap, vram_gb=vram_gb)
        self._describe(report, plan)
        log.debug(f"encode {width}x{height}, {count} frames: {plan.describe()}")
        spans = frame_spans(count, plan.steps.latents, t)
        passes = batch if plan.fused else len(plan.grid) + 1 if plan.tiled else 1
        tick = Ticker(progress, cancel, len(spans) * passes)
        encoder = self.model.encoder
        out = torch.empty(batch, 2 * self.latent_channels, latents, h, w)
        if plan.fused:
            with report.measured(self.device), self._scope(), report.stage("encode"):
                self._fused.encode(video, spans, plan, out, tick, self.device)
            return out

        def network(y0: int, y1: int, x0: int, x1: int) -> Iterator[Tensor]:
            # The last tile also takes the rows and columns that fill no latent pixel, as the untiled network does.
            y1, x1 = (height if y1 == h else s * y1), (width if x1 == w else s * x1)
            parts = (to_network(video[:, a:b, s * y0 : y1, s * x0 : x1], self.device, self.dtype) for a, b in spans)
            return encode_features(encoder, parts, plan.steps, tick.check)

        with report.measured(self.device), self._scope(), report.stage("encode"):
            whole = not plan.tiled
            features = network(0, h, 0, w) if whole else self._encode_tiles(network, plan, batch, latents, tick)
            first = 0
            for part in encode_moments(encoder, features, tick.check):
                out[:, :, first : first + part.shape[2]] = part
                first += part.shape[2]
                tick.advance()
        return out

    def _encode_tiles(
        self, network: Callable[..., Iterator[Tensor]], plan: Plan, batch: int, latents: int, tick: Ticker
    ) -> Iterator[Tensor]:
        """Tiles down to latent resolution, their features blended in host memory; the low part sees whole frames."""
        rows, cols = plan.grid.rows, plan.grid.cols
        blended = None
        for i, j in plan.grid.indices():
            (y0, y1), (x0, x1) = rows.spans()[i], cols.spans()[j]
            weight = (rows.weights(i)[:, None] * cols.weights(j)[None, :]).to(self.device)
            first = 0
            for part in network(y0, y1, x0, x1):
                if blended is None:
                    blended = torch.zeros(batch, part.shape[1], latents, rows.length, cols.length)
                n = part.shape[2]
                blended[:, :, first : first + n, y0:y1, x0:x1] += (part.float() * weight).cpu()
                first += n
                tick.advance()
        return (part.to(self.device, self.dtype) for part in blended.split(plan.steps.latents, 2))

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check_latent(self, latent: Tensor) -> Tensor:
        z = latent.unsqueeze(0) if latent.ndim == 4 else latent
        c = self.latent_channels
        if z.ndim != 5 or z.shape[1] != c:
            raise InputError(f"a latent of this VAE is [B, {c}, T, h, w] or [{c}, T, h, w], not {list(latent.shape)}")
        if min(z.shape) < 1:
            raise InputError(f"the latent {list(latent.shape)} is empty: it needs at least one frame and pixel")
        if not torch.isfinite(z).all():
            raise InputError("the latent holds NaN or Inf: the step that made it failed")
        return z

    def _check_video(self, video: Tensor) -> Tensor:
        self._need_encoder()
        x = video.unsqueeze(0) if video.ndim == 4 else video
        if x.ndim != 5 or x.shape[-1] != 3:
            raise InputError(f"video frames are [B, F, H, W, 3] or [F, H, W, 3], not {list(video.shape)}")
        if x.shape[0] < 1 or x.shape[1] < 1:
            raise InputError(f"the video {list(video.shape)} has no frames")
        if min(x.shape[2:4]) < self.spatial:
            least = f"{self.spatial}x{self.spatial}"
            raise InputError(f"frames of {x.shape[3]}x{x.shape[2]} are too small: at least {least} pixels")
        if x.dtype != torch.uint8 and not all(torch.isfinite(f).all() for clip in x for f in clip):
            raise InputError("the video holds NaN or Inf")
        return x

    def _need_encoder(self) -> None:
        if not self.can_encode:
            raise InputError(f"{self.path or 'this VAE'} holds a decoder only: encoding needs a file with the encoder")


def _never() -> None:
    """The raw pair is not cancelled."""
