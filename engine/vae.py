"""The VAE object: decode and encode clips within a memory target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import call
from .core import Core, no_check
from .documented import DocumentedMethods
from .errors import InputError
from .network.stream import frame_spans
from .request import Request, check_latent, check_video
from .run.plan import Plan, Steps
from .run.progress import Cancel, Progress, Ticker


class VideoVAE(Core, DocumentedMethods):
    """A loaded VAE of videos or pictures.

    Latents of `decode` and `encode` are host-scaled (the network's times `scale`), those of the `_raw` pair are the
    network's own. Results lie in host memory. Memory options are in GB (2^30); 0 means automatic.
    """

    # -- decode ---------------------------------------------------------------------------------------------------

    def plan_decode(self, latents: int, height: int, width: int, **options: Any) -> Plan:
        """The plan `decode` follows now for clips of [C, latents, height, width] latents, or so many pictures; options:
        of `Request`."""
        side = self.architecture.side
        return self._plan("decoder", (latents, side * height, side * width), Request(**options))

    def decode(
        self,
        latent: Tensor,
        *,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        plan: Plan | None = None,
        out: Tensor | None = None,
        seed: int | None = None,
        noise: float | None = None,
        timestep: float | None = None,
        **options: Any,
    ) -> Tensor:
        """Host-scaled latent [B, C, T, h, w] (or [C, T, h, w]) -> frames [B, 4(T-1)+1, s*h, s*w, 3] in 0..1.

        s: `spatial`. A VAE of pictures (`temporal` 1) gives each latent a frame of its own and takes [B, C, h, w] too.
        options: those of `Request`: tiling, tile, overlap, chunk, vram_gb, ram_gb and output.
        progress(done, total) after each chunk; cancel() true raises Cancelled. on_plan(plan) tells of the plan that is
        about to run, once more where another one takes over. plan: one made for this call, which runs if it still fits.
        out: a host tensor of the result's shape and type to write into, for looking at frames while the run goes on.
        seed, noise, timestep: of decoders that take them; noise is a share of the latents' values, and None is what the
        file says, else what ComfyUI takes, or for the seed 0. The same noise whatever the chunks.
        Raises InputError on a wrong latent or option, PlanError when nothing fits the target.
        """
        request = Request(**options)
        z = check_latent(latent, self.latent_channels, self.architecture.still)
        vae = self.at(timestep)
        z, inside = self.noised(z, seed, noise)
        frames = call.decode(vae, z, request, Ticker(progress, cancel), out, on_plan, plan, inside)
        if vae is not self:
            self._own.report = vae.last_report
        return frames

    def decode_raw(self, z: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """The network as it is: unscaled latent [B, C, T, h, w] -> [B, 3, F, H, W], not clamped, on the VAE's device.

        chunk: latents per step, frames: frames per step after the temporal upsamplers (0: all at once).
        """
        z = check_latent(z, self.latent_channels, self.architecture.still)
        if self.model.packing is not None:
            z = self.model.packing.unpack(z)
        self._plain.set_layout(self._options)
        with self._scope():
            chunks = self._plain.frames(z, Steps(chunk, frames), self.device, no_check)
            return torch.cat([y for part in chunks for y in part], 2)

    # -- encode ---------------------------------------------------------------------------------------------------

    def plan_encode(
        self, latents: int, height: int, width: int, rest: tuple[int, int] = (0, 0), **options: Any
    ) -> Plan:
        """The plan `encode` follows now for frames that become [C, latents, height, width] latents, and leave `rest`
        rows and columns of pixels that fill none; options: of `Request`."""
        self._need_encoder()
        side = self.architecture.side
        return self._plan("encoder", (latents, side * height, side * width), Request(**options), rest)

    def encode(
        self,
        video: Tensor,
        *,
        seed: int | None = None,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        plan: Plan | None = None,
        **options: Any,
    ) -> Tensor:
        """Frames [B, F, H, W, 3] or [F, H, W, 3] in 0..1 (or uint8) -> host-scaled latent [B, C, T, H//s, W//s].

        T = (F - 1) // 4 + 1; frames beyond 4(T - 1) + 1 are not read. A VAE of pictures takes [B, H, W, 3] for B clips
        of one frame; one with transparency takes [..., 4], and frames without are opaque. seed None gives the mean, a
        seed a sample.
        Options (but no output) and errors as in `decode`.
        """
        self._need_encoder()
        request = Request(**options, output="float32")
        x = check_video(video, self.spatial, self.architecture.still, self.colours[0])
        return call.encode(self, x, request, Ticker(progress, cancel), seed, on_plan, plan)

    def encode_raw(self, x: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """The network as it is: [B, 3, F, H, W] in -1..1 -> moments [B, 2C, T, h, w], on the VAE's device.

        chunk: latents per step, frames: frames per step before the first downsampler (0: all at once).
        """
        self._need_encoder()
        c = self.colours[0]
        if x.ndim != 5 or x.shape[1] != c or x.shape[2] < 1 or min(x.shape[3:]) < self.spatial:
            least = f"{self.spatial}x{self.spatial}"
            raise InputError(f"encode_raw takes [B, {c}, F, H, W] of at least {least} pixels, not {list(x.shape)}")
        parts = (x[:, :, a:b] for a, b in frame_spans(x.shape[2], chunk, self.temporal))
        self._plain.set_layout(self._options)
        with self._scope():
            return torch.cat(list(self._plain.moments(parts, Steps(chunk, frames), self.device, no_check)), 2)

    def _need_encoder(self) -> None:
        if not self.can_encode:
            raise InputError(f"{self.path or 'this VAE'} holds a decoder only: encoding needs a file with the encoder")
