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
from .fused_path import FusedPath
from .kernels.exact import as_products
from .network.stream import frame_spans
from .options import DEFAULTS, Options, unavailable, unused
from .plain_path import PlainPath
from .planning.budget import host_budget, memory_room, memory_target
from .planning.fusable import why_off
from .planning.make import make_planner, mode_of, switched_off
from .precision.digest import digest
from .precision.mixed import Mixed
from .precision.modes import MIXED, PRECISIONS
from .precision.sampling import latent_samples, video_samples
from .precision.store import Store
from .request import Request, check_latent, check_out, check_video
from .run import clip
from .run.caches import empty_host_cache
from .run.clip import Half
from .run.guard import Guard
from .run.kept import KEPT
from .run.pinned import POOL
from .run.pixels import PixelSink, to_unit
from .run.plan import Plan, Steps
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
        self._plain = PlainPath(model, self.architecture, dtype)
        self._mixed = self._mode_of(options)
        self.planner = make_planner(
            self.architecture, model.config, dtype, options, self._mixed.mode, lambda: self.fused() is not None,
            lambda: as_products(self.device, dtype, options.tf32),
        )
        self._fused = FusedPath(model, self.planner.walk, self.store)

    def _mode_of(self, options: Options) -> Mixed:
        off = self._kernels_off(emulate=True)
        mode = mode_of(self._asked, self._float, self.dtype, self.device, options, off)
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
        here = self.arch, self.model.config, self.dtype, self.device
        return switched_off(self._options) or why_off(*here, emulate, True)

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

    def _plan(
        self, half: str, size: tuple[int, int, int, int], request: Request, below: int = 0,
        check: Callable[[], None] = _never, rest: tuple[int, int] = (0, 0),
    ) -> Plan:
        """size: batch, latents, height and width in latent pixels; below, check, rest: as for the plans of users."""
        r, limits = request, {"host": host_budget(self.device, request.ram_gb)}
        held = self._held(half)
        if below:
            limits["target"] = below - 1
        else:
            limits["target"] = memory_target(self.device, r.vram_gb, r.ram_gb, held)
            limits["room"] = memory_room(self.device, r.vram_gb, held)
        return self.planner.plan(
            half, *size, tiling=r.tiling, tile=r.tile, overlap=r.overlap, chunk=r.chunk, output=r.dtype, rest=rest,
            check=check, **limits,
        )  # fmt: skip

    def _half(self, name: str, plan: Plan) -> Half:
        path = self._fused if plan.fused else self._plain
        return path.half(name, self.scale, self.device)

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
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, output)
        return self._plan("decoder", (batch, latents, height, width), request, below, check)

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
        on_plan: Callable[[Plan], None] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Host-scaled latent [B, C, T, h, w] (or [C, T, h, w]) -> frames [B, 4(T-1)+1, s*h, s*w, 3] in 0..1.

        s: `spatial`. tiling: "untiled" runs whole frames, "exact" equals them (fused on a GPU in bands of `tile` rows,
        where that is given), "blended" uses tiles of `tile` pixels (0: chosen for the target) sharing `overlap` pixels;
        "auto" runs whole frames, or what else fits, and says so. chunk: latents per step. output: "float32", "float16"
        or "uint8" (0..255). progress(done, total) after each chunk; cancel() true raises Cancelled.
        on_plan(plan) tells of the plan that is about to run, once more where another one takes over.
        out: a host tensor of the result's shape and type to write into, for looking at frames while the run goes on.
        Raises InputError on a wrong latent or option, PlanError when nothing fits the target.
        """
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, output)
        z = check_latent(latent, self.latent_channels)
        batch, _, count, h, w = z.shape
        shape = (batch, self.frames(count), self.spatial * h, self.spatial * w, 3)
        if out is not None:
            check_out(out, shape, request.dtype)
        report = self._begin("decode", shape[:4])
        sink = PixelSink(shape, request.dtype, out)
        guard = Guard(Ticker(progress, cancel), self.device, report.events, self.on_pressure)

        def plan(vae: VideoVAE, below: int) -> Plan:
            if not below:
                vae._settle("decoder", lambda: [p.to(vae.device).float() / vae.scale for p in latent_samples(z[0])])
            return vae._plan("decoder", (batch, count, h, w), request, below, guard.tick.check)

        def attempt(vae: VideoVAE, plan: Plan) -> None:
            clip.decode(vae._half("decoder", plan), z, plan, sink, guard)

        self._survive(report, guard, plan, attempt, on_plan)
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
            chunks = self._plain.frames(z, Steps(chunk, frames), self.device, _never)
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
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb)
        return self._plan("encoder", (batch, latents, height, width), request, below, check, rest)

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
        on_plan: Callable[[Plan], None] | None = None,
    ) -> Tensor:
        """Frames [B, F, H, W, 3] or [F, H, W, 3] in 0..1 (or uint8) -> host-scaled latent [B, C, T, H//s, W//s].

        T = (F - 1) // 4 + 1; frames beyond 4(T - 1) + 1 are not read. seed None gives the mean, a seed a sample.
        Options and errors as in `decode`.
        """
        self._need_encoder()
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb)
        x = check_video(video, self.spatial)
        report = self._begin("encode", x.shape[:4])
        batch, count, height, width, _ = x.shape
        latents, h, w = (count - 1) // self.temporal + 1, height // self.spatial, width // self.spatial
        moments = torch.empty(batch, 2 * self.latent_channels, latents, h, w)
        rest = height % self.spatial, width % self.spatial
        guard = Guard(Ticker(progress, cancel), self.device, report.events, self.on_pressure)

        def plan(vae: VideoVAE, below: int) -> Plan:
            if not below:
                vae._settle("encoder", lambda: [to_unit(p.to(vae.device)) for p in video_samples(x[0])])
            return vae._plan("encoder", (batch, latents, h, w), request, below, guard.tick.check, rest)

        def attempt(vae: VideoVAE, plan: Plan) -> None:
            clip.encode(vae._half("encoder", plan), x, plan, moments, guard)

        self._survive(report, guard, plan, attempt, on_plan)
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
