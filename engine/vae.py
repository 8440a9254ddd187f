"""The VAE object: decode and encode clips within a memory target."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from . import log
from .errors import InputError, NonFiniteError, PlanError
from .fused.path import FusedPath, why_off
from .models.arch import Architecture
from .plain import PlainPath
from .runtime.guard import SAFER, Guard, NonFinite
from .runtime.memory import host_budget, memory_target
from .runtime.pixels import OUTPUTS, PixelSink
from .runtime.plan import Plan, Planner
from .runtime.progress import Cancel, Progress, Ticker
from .runtime.scope import exact_math
from .runtime.stream import Steps, frame_spans


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
    ) -> None:
        self.model = model
        self.architecture = architecture
        self.arch = architecture.name
        self.precision = precision
        self.dtype = dtype
        self.device = device
        self.path = path
        self.latent_channels: int = model.config.latent_channels
        self.spatial = architecture.spatial
        self.temporal = architecture.temporal
        self.scale = architecture.scale
        #: Off runs the plain torch modules instead of the fused kernels.
        self.triton_fusion = True
        #: Asked to free memory that is not the engine's when a run finds none; None: there is nobody to ask.
        self.on_pressure: Callable[[], None] | None = None
        #: What the latest decode or encode survived, as `Guard` counts it.
        self.events: Counter[str] = Counter()
        self._prepare()

    def _prepare(self) -> None:
        """The paths and plans for these weights."""
        model, dtype = self.model, self.dtype

        def build() -> nn.Module:
            return self.architecture.build(model.config)

        self._plain = PlainPath(model, self.architecture, dtype)
        self._fused = FusedPath(model, build, dtype)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self.planner = Planner(build, dtype, weights, self.fused)

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
        self.model.to(self.device)
        return self

    def fused(self) -> FusedPath | None:
        """The fused kernels, or None where they are switched off or cannot run; the reason is logged once."""
        reason = "switched off" if not self.triton_fusion else None
        reason = reason or why_off(self.arch, self.model.config, self.dtype, self.device)
        if reason:
            if self.device.type == "cuda":
                log.once(f"fused kernels off: {reason}")
            return None
        return self._fused

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
    ) -> Plan:
        """The plan `decode` follows for [batch, C, latents, height, width] latents.

        below: the first one whose peak is less than so many bytes, whatever is free (0: the one for what is free).
        """
        target = below - 1 if below else memory_target(self.device, vram_gb, ram_gb, self._held("decoder"))
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
        """Host-scaled latent [B, C, T, h, w] (or [C, T, h, w]) -> frames [B, 4(T-1)+1, 8h, 8w, 3] in 0..1.

        tiling: "auto" and "untiled" run whole frames, "exact" equals them, "blended" uses tiles of `tile` pixels
        (0: chosen for the target) sharing `overlap` pixels. chunk: latents per step. output: "float32", "float16"
        or "uint8" (0..255). progress(done, total) after each chunk; cancel() true raises Cancelled.
        Raises InputError on a wrong latent or option, PlanError when nothing fits the target.
        """
        if output not in OUTPUTS:
            raise InputError(f"output={output!r} is not one of {', '.join(OUTPUTS)}")
        z = self._check_latent(latent)
        batch, _, count, h, w = z.shape
        size = batch, count, h, w
        options = {
            "tiling": tiling, "tile": tile, "overlap": overlap, "chunk": chunk, "vram_gb": vram_gb, "ram_gb": ram_gb,
            "output": output,
        }  # fmt: skip
        shape = (batch, self.frames(count), self.spatial * h, self.spatial * w, 3)
        sink = PixelSink(shape, OUTPUTS[output])

        def attempt(vae: VideoVAE, plan: Plan) -> None:
            passes = len(plan.grid) + 1 if plan.tiled else 1
            if guard.begin(plan.grid, batch * count * passes):
                sink.begin(plan.tiled)
            path = vae._fused if plan.fused else vae._plain
            run = path.decode_tiles if plan.tiled else path.decode
            run(z, vae.scale, plan, sink, guard, vae.device)

        guard = Guard(Ticker(progress, cancel), self.device, self._new_events(), self.on_pressure)
        self._survive(guard, lambda vae, below: vae.plan_decode(*size, **options, below=below), attempt)
        return sink.finish()

    def decode_raw(self, z: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """The network as it is: unscaled latent [B, C, T, h, w] -> [B, 3, F, H, W], not clamped, on the VAE's device.

        chunk: latents per step, frames: frames per step after the temporal upsamplers (0: all at once).
        """
        z = self._check_latent(z)
        with exact_math(self.device):
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
        vram_gb: float | None = None,
        below: int = 0,
    ) -> Plan:
        """The plan `encode` follows for frames that become [batch, C, latents, height, width] latents; `below` as in
        `plan_decode`."""
        self._need_encoder()
        target = below - 1 if below else memory_target(self.device, vram_gb, None, self._held("encoder"))
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
        """Frames [B, F, H, W, 3] or [F, H, W, 3] in 0..1 (or uint8) -> host-scaled latent [B, C, T, H//8, W//8].

        T = (F - 1) // 4 + 1; frames beyond 4(T - 1) + 1 are not read. seed None gives the mean, a seed a sample.
        Options and errors as in `decode`.
        """
        options = {"tiling": tiling, "tile": tile, "overlap": overlap, "vram_gb": vram_gb}
        moments = self._moments(self._check_video(video), options, progress, cancel)
        return self.model.sample(moments, seed) * self.scale

    def encode_raw(self, x: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """The network as it is: [B, 3, F, H, W] in -1..1 -> moments [B, 2C, T, h, w], on the VAE's device.

        chunk: latents per step, frames: frames per step before the first downsampler (0: all at once).
        """
        self._need_encoder()
        if x.ndim != 5 or x.shape[1] != 3 or x.shape[2] < 1 or min(x.shape[3:]) < self.spatial:
            raise InputError(f"encode_raw takes [B, 3, F, H, W] of at least 8x8 pixels, not {list(x.shape)}")
        parts = (x[:, :, a:b] for a, b in frame_spans(x.shape[2], chunk, self.temporal))
        with exact_math(self.device):
            return torch.cat(list(self._plain.moments(parts, Steps(chunk, frames), self.device, _never)), 2)

    def _moments(
        self, video: Tensor, options: dict[str, object], progress: Progress | None, cancel: Cancel | None
    ) -> Tensor:
        batch, count, height, width, _ = video.shape
        latents, h, w = (count - 1) // self.temporal + 1, height // self.spatial, width // self.spatial
        out = torch.empty(batch, 2 * self.latent_channels, latents, h, w)

        def attempt(vae: VideoVAE, plan: Plan) -> None:
            guard.begin(plan.grid, batch * latents * (len(plan.grid) + 1 if plan.tiled else 1))
            path = vae._fused if plan.fused else vae._plain
            path.encode(video, plan, out, guard, vae.device)

        guard = Guard(Ticker(progress, cancel), self.device, self._new_events(), self.on_pressure)
        size = batch, latents, h, w
        self._survive(guard, lambda vae, below: vae.plan_encode(*size, **options, below=below), attempt)
        return out

    # -- trouble --------------------------------------------------------------------------------------------------

    def _survive(
        self, guard: Guard, plan: Callable[[VideoVAE, int], Plan], attempt: Callable[[VideoVAE, Plan], None]
    ) -> None:
        """attempt(vae, plan) until it comes through: under leaner plans where memory runs out, and with this VAE in a
        safer precision where values overflow. plan(vae, below) as in `plan_decode`."""
        vae = self
        while True:
            first = plan(vae, 0)
            log.debug(first.describe())
            try:
                with exact_math(vae.device):
                    guard.survive(functools.partial(attempt, vae), first, functools.partial(_leaner, vae, plan))
                return
            except NonFinite as error:
                where = error.where
            vae = vae._safer(where, guard)

    def _safer(self, where: str, guard: Guard) -> VideoVAE:
        """This VAE in the type of the next wider range. Raises NonFiniteError where there is none."""
        if self.dtype not in SAFER:
            raise NonFiniteError(f"{where} came out as NaN or Inf in {self.precision}: weights or latent are damaged")
        dtype, name = SAFER[self.dtype]
        guard.events["nan_reruns"] += 1
        log.warn(f"{where} came out as NaN or Inf in {self.precision}; going on from there in {name}")
        self.release()
        other = copy.copy(self)
        other.precision, other.dtype = name, dtype
        other.model = copy.deepcopy(self.model).to(dtype)
        other._prepare()
        return other

    def _new_events(self) -> Counter[str]:
        self.events = Counter()
        return self.events

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
            raise InputError(f"frames of {x.shape[3]}x{x.shape[2]} are too small: at least 8x8 pixels")
        if x.dtype != torch.uint8 and not all(torch.isfinite(f).all() for clip in x for f in clip):
            raise InputError("the video holds NaN or Inf")
        return x

    def _need_encoder(self) -> None:
        if not self.can_encode:
            raise InputError(f"{self.path or 'this VAE'} holds a decoder only: encoding needs a file with the encoder")


def _leaner(vae: VideoVAE, plan: Callable[[VideoVAE, int], Plan], failed: Plan) -> Plan | None:
    try:
        return plan(vae, failed.peak_bytes)
    except PlanError:
        return None


def _never() -> None:
    """The raw pair is not cancelled."""
