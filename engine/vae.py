"""The VAE object: decode and encode clips within a memory target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from . import log
from .archs import Architecture
from .call import Attempts
from .compat.methods import DocumentedMethods
from .errors import InputError
from .fused_path import FusedPath, why_off
from .kernels.exact import as_products
from .network.stream import Steps, frame_spans
from .options import DEFAULTS, OFF, Options, unavailable, unused
from .plain_path import PlainPath
from .planning.budget import host_budget, memory_room, memory_target
from .planning.planner import Plan, Planner
from .precision.digest import digest
from .precision.measure import latent_samples, video_samples
from .precision.mixed import Mixed
from .precision.modes import MIXED, PRECISIONS, resolve
from .precision.store import Store
from .request import check_latent, check_video
from .run.caches import empty_host_cache
from .run.guard import Guard
from .run.kept import KEPT
from .run.pinned import POOL
from .run.pixels import OUTPUTS, PixelSink, to_unit
from .run.progress import Cancel, Progress, Ticker
from .source import Source


def _never() -> None:
    """Nothing cancels the raw pair, or a plan on its own."""


class VideoVAE(Attempts, DocumentedMethods):
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
        native = PRECISIONS[architecture.native]
        self.store = Store(None if path is None else lambda: digest(model.state_dict(), native))
        self.model = self._loaded = model
        #: Where `model` can be read again without the rounding to `dtype`; None: it was not rounded.
        self.source: Source | None = None
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
        self._separate()
        #: Asked to free memory that is not the engine's when a run finds none; None: there is nobody to ask.
        self.on_pressure: Callable[[], None] | None = None
        self._use(DEFAULTS)

    def _use(self, options: Options) -> None:
        """Set the options, with packed weights and plans made for them."""
        self._options = options
        model, dtype = self.model, self.dtype

        def build() -> nn.Module:
            return self.architecture.build(model.config)

        self._plain = PlainPath(model, self.architecture, dtype)
        self._fused = FusedPath(model, self.architecture, dtype, options, self.store)
        self._mixed = self._mode_of(options)
        for half in ("encoder", "decoder"):
            if getattr(model, half) is not None:
                self._fused.use(half, self._mixed.policy(half))
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self.planner = Planner(
            build, dtype, weights, self.fused, self.spatial, self.temporal, options.flash_attention,
            lambda: as_products(self.device, dtype, options.tf32),
        )  # fmt: skip

    def _mode_of(self, options: Options) -> Mixed:
        asked = self._asked
        if options.fp8 and self.device.type == "cuda" and asked not in MIXED and self.dtype != torch.float32:
            asked = "fp8"
        off = self._kernels_off(emulate=True)
        mode = resolve(asked, self.device, options.min_db, off, self._float)
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
        other._separate()
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

    def unused(self, fused: bool | None = None) -> dict[str, str]:
        """Optimisation -> why runs do not use it. fused: those on the fused kernels, or those that are not (None:
        untiled runs, whichever they are)."""
        mode, fused = self._mixed.mode, self.fused() is not None if fused is None else fused
        kernels_off = why_off(self.arch, self.model.config, self.dtype, self.device)
        off = unused(self._options, unavailable(self.device, self.dtype, kernels_off), self.dtype, fused)
        if mode.kind and fused:
            off.pop("fp8", None)
            if self.device.type == "cpu":
                off.pop("composed_upsample", None)
        if mode.refused:
            off[self._asked if self._asked in MIXED else "fp8"] = mode.refused
        return off

    def _kernels_off(self, emulate: bool = False) -> str | None:
        if not self._options.triton_fusion:
            return OFF
        if self._options.channels_last_3d is False:
            return "channels_last_3d is switched off, and they know no other layout"
        return why_off(self.arch, self.model.config, self.dtype, self.device, emulate, True)

    def _settle(self, half: str, samples: Callable[[], list[Tensor]]) -> None:
        """Choose the operands of a half for a clip, before it is planned."""
        with torch.no_grad(), self._scope():
            self._fused.use(half, self._mixed.settle(half, samples))

    def release(self) -> int:
        """Give back the memory that only makes the next run start sooner: graphs, packed weights and page-locked host
        memory, torch's own included. Returns the bytes of the packed weights."""
        POOL.release()
        empty_host_cache()
        return self.release_packed()

    def release_packed(self, keep: str = "") -> int:
        """The part of `release` on the device: graphs and packed weights, those of the half `keep` excepted."""
        return self._fused.release(keep)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights now on the device, beside the model's own."""
        return sum(map(self._fused.packed_bytes, ("encoder", "decoder")))

    def frames(self, latents: int) -> int:
        """Frames that `latents` decode to."""
        return self.temporal * (latents - 1) + 1

    def _held(self, half: str) -> int:
        """Bytes on its device that a plan for `half` counts, or that are freed before it runs: they are not foreign."""
        here = (p for p in self.model.parameters() if p.device.type == self.device.type)
        return sum(p.nbytes for p in here) + self._fused.packed_bytes(half) + KEPT.nbytes(self.device)

    def _limits(self, half: str, vram_gb: float | None, ram_gb: float | None, below: int) -> dict[str, int | None]:
        """Memory that a plan may take, as `Planner.plan` has it."""
        host, held = host_budget(self.device, ram_gb), self._held(half)
        if below:
            return {"target": below - 1, "host": host}
        target = memory_target(self.device, vram_gb, ram_gb, held)
        return {"target": target, "room": memory_room(self.device, vram_gb, held), "host": host}

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
        below: int = 0,
        check: Callable[[], None] = _never,
    ) -> Plan:
        """The plan `decode` follows for [batch, C, latents, height, width] latents.

        below: the first one whose peak is less than so many bytes, whatever is free (0: the one for what is free).
        check: called while it is looked for; may raise.
        """
        return self.planner.plan(
            "decoder", batch, latents, height, width,
            tiling=tiling, tile=tile, overlap=overlap, chunk=chunk, output=OUTPUTS[output], check=check,
            **self._limits("decoder", vram_gb, ram_gb, below),
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
        out: Tensor | None = None,
    ) -> Tensor:
        """Host-scaled latent [B, C, T, h, w] (or [C, T, h, w]) -> frames [B, 4(T-1)+1, s*h, s*w, 3] in 0..1.

        s: `spatial`. tiling: "untiled" runs whole frames, "exact" equals them (fused on a GPU in bands of `tile` rows,
        where that is given), "blended" uses tiles of `tile` pixels (0: chosen for the target) sharing `overlap` pixels;
        "auto" runs whole frames, or what else fits, and says so. chunk: latents per step. output: "float32", "float16"
        or "uint8" (0..255). progress(done, total) after each chunk; cancel() true raises Cancelled.
        out: a host tensor of the result's shape and type to write into, for looking at frames while the run goes on.
        Raises InputError on a wrong latent or option, PlanError when nothing fits the target.
        """
        if output not in OUTPUTS:
            raise InputError(f"output={output!r} is not one of {', '.join(OUTPUTS)}")
        z = check_latent(latent, self.latent_channels)
        batch, _, count, h, w = z.shape
        shape = (batch, self.frames(count), self.spatial * h, self.spatial * w, 3)
        if out is not None and (tuple(out.shape), out.dtype, out.device.type) != (shape, OUTPUTS[output], "cpu"):
            given = f"{out.dtype} {list(out.shape)} on {out.device}"
            raise InputError(f"out is {given}: the frames need {output} {list(shape)} on cpu")
        report = self._begin("decode", shape[:4])
        sink = PixelSink(shape, OUTPUTS[output], out)
        guard = Guard(Ticker(progress, cancel), self.device, report.events, self.on_pressure)

        def plan(vae: VideoVAE, below: int) -> Plan:
            if not below:
                vae._settle("decoder", lambda: [p.to(vae.device).float() / vae.scale for p in latent_samples(z[0])])
            return vae.plan_decode(
                batch, count, h, w,
                tiling=tiling, tile=tile, overlap=overlap, chunk=chunk, vram_gb=vram_gb, ram_gb=ram_gb, output=output,
                below=below, check=guard.tick.check,
            )  # fmt: skip

        def attempt(vae: VideoVAE, plan: Plan) -> None:
            if guard.begin(plan.grid, count, plan.steps.latents, _passes(plan, batch)):
                sink.begin(plan.tiled)
            path = vae._fused if plan.fused else vae._plain
            decode = path.decode_tiles if plan.tiled else path.decode
            decode(z, vae.scale, plan, sink, guard, vae.device)

        self._survive(report, guard, plan, attempt)
        with report.stage("output"):
            frames = sink.finish()
        report.complete = True
        return frames

    def decode_raw(self, z: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """The network as it is: unscaled latent [B, C, T, h, w] -> [B, 3, F, H, W], not clamped, on the VAE's device.

        chunk: latents per step, frames: frames per step after the temporal upsamplers (0: all at once).
        """
        z = check_latent(z, self.latent_channels)
        self._plain.set_layout(self._options)
        with self._scope():
            chunks = self._plain.frames(z, 1.0, Steps(chunk, frames), self.device, _never)
            return torch.cat([y for part in chunks for y in part], 2)

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
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        below: int = 0,
        check: Callable[[], None] = _never,
        rest: tuple[int, int] = (0, 0),
    ) -> Plan:
        """The plan `encode` follows for frames that become [batch, C, latents, height, width] latents; `below` and
        `check` as in `plan_decode`. rest: their rows and columns of pixels that fill no latent pixel."""
        self._need_encoder()
        return self.planner.plan(
            "encoder", batch, latents, height, width,
            tiling=tiling, tile=tile, overlap=overlap, chunk=chunk, rest=rest, check=check,
            **self._limits("encoder", vram_gb, ram_gb, below),
        )  # fmt: skip

    def encode(
        self,
        video: Tensor,
        *,
        tiling: str = "auto",
        tile: int = 0,
        overlap: int = 64,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Tensor:
        """Frames [B, F, H, W, 3] or [F, H, W, 3] in 0..1 (or uint8) -> host-scaled latent [B, C, T, H//s, W//s].

        T = (F - 1) // 4 + 1; frames beyond 4(T - 1) + 1 are not read. seed None gives the mean, a seed a sample.
        Options and errors as in `decode`.
        """
        self._need_encoder()
        x = check_video(video, self.spatial)
        report = self._begin("encode", x.shape[:4])
        batch, count, height, width, _ = x.shape
        latents, h, w = (count - 1) // self.temporal + 1, height // self.spatial, width // self.spatial
        moments = torch.empty(batch, 2 * self.latent_channels, latents, h, w)
        guard = Guard(Ticker(progress, cancel), self.device, report.events, self.on_pressure)

        def plan(vae: VideoVAE, below: int) -> Plan:
            if not below:
                vae._settle("encoder", lambda: [to_unit(p.to(vae.device)) for p in video_samples(x[0])])
            return vae.plan_encode(
                batch, latents, h, w,
                tiling=tiling, tile=tile, overlap=overlap, chunk=chunk, vram_gb=vram_gb, ram_gb=ram_gb, below=below,
                check=guard.tick.check, rest=(height % self.spatial, width % self.spatial),
            )  # fmt: skip

        def attempt(vae: VideoVAE, plan: Plan) -> None:
            guard.begin(plan.grid, latents, plan.steps.latents, _passes(plan, batch))
            path = vae._fused if plan.fused else vae._plain
            path.encode(x, plan, moments, guard, vae.device)

        self._survive(report, guard, plan, attempt)
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
        parts = (x[:, :, a:b] for a, b in frame_spans(x.shape[2], chunk, self.temporal))
        self._plain.set_layout(self._options)
        with self._scope():
            return torch.cat(list(self._plain.moments(parts, Steps(chunk, frames), self.device, _never)), 2)

    def _need_encoder(self) -> None:
        if not self.can_encode:
            raise InputError(f"{self.path or 'this VAE'} holds a decoder only: encoding needs a file with the encoder")


def _passes(plan: Plan, batch: int) -> int:
    """Through how many passes over its latents a result is made: plain torch takes all clips at once."""
    return (len(plan.grid) + 1 if plan.tiled else 1) * (batch if plan.fused else 1)
