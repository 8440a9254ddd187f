"""The VAE object: decode and encode clips within a memory target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from . import call, several
from .core import Core, no_check
from .documented import DocumentedMethods
from .errors import InputError
from .network.stream import frame_spans
from .request import Request, check_latent, check_out, check_part, check_video
from .run.clip import UNKNOWN, Latents
from .run.plan import Plan, Steps
from .run.progress import Cancel, Progress, Ticker
from .run.results import Finished, HandedOn
from .several import Devices
from .video import StreamVideo

#: Results that a stream in blended tiles makes at least at once.
BLOCK = 16


class VideoVAE(Core, DocumentedMethods):
    """A loaded video VAE.

    Latents of `decode` and `encode` are host-scaled (the network's times `scale`), those of the `_raw` pair are the
    network's own. Results lie in host memory. Memory options are in GB (2^30); 0 means automatic.
    """

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
        check: Callable[[], None] = no_check,
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
        start: int = 0,
        frames: int | None = None,
        devices: Devices = None,
        mixed_devices: bool = False,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Host-scaled latent [B, C, T, h, w] (or [C, T, h, w]) -> frames [B, 4(T-1)+1, s*h, s*w, 3] in 0..1.

        s: `spatial`. tiling: "untiled" runs whole frames, "exact" equals them (fused on a GPU in bands of `tile` rows,
        where that is given), "blended" uses tiles of `tile` pixels (0: chosen for the target) sharing `overlap` pixels;
        "auto" runs whole frames, or what else fits, and says so. chunk: latents per step. output: "float32", "float16"
        or "uint8" (0..255). start, frames: only frames [start, start + frames) of each clip (None: up to its end), with
        the bits that they have in the whole. devices: GPUs that share the work, with the same bits: a list of names (or
        one string with commas), "all", or None or "auto", the VAE's own alone; GPUs of different kinds are refused
        unless mixed_devices is true. progress(done, total) after each chunk; cancel() true raises Cancelled.
        on_plan(plan) tells of the plan that is about to run, once more where another one takes over.
        out: a host tensor of the result's shape and type to write into, for looking at frames while the run goes on.
        Raises InputError on a wrong latent or option, PlanError when nothing fits the target.
        """
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, output)
        z = check_latent(latent, self.latent_channels)
        wanted = check_part(start, frames, self.frames(z.shape[2]))
        shape = z.shape[0], len(wanted), self.spatial * z.shape[3], self.spatial * z.shape[4], 3
        if out is None:
            out = torch.empty(shape, dtype=request.dtype)
        check_out(out, shape, request.dtype)
        several.decode(self, devices, mixed_devices, z, request, out, wanted, progress, cancel, on_plan)
        return out

    def stream(
        self,
        latent: Tensor | Latents,
        *,
        tiling: str = "auto",
        tile: int = 0,
        overlap: int = 64,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        output: str = "float32",
        start: int = 0,
        frames: int | None = None,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        on_plan: Callable[[Plan], None] | None = None,
    ) -> Iterator[Tensor]:
        """The frames of `decode`, for one clip, as they are finished: [1, f, s*h, s*w, 3], f >= 1, each to be kept or
        forgotten by the caller.

        Takes what `decode` takes, and latents that are read when they are needed (files/latents.LatentFile). Frames of
        a few chunks are in memory at any time; blended tiles take so many that a frame depends on no others. Ending
        the iterator early frees all that the run holds.
        """
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, output)
        z = check_latent(latent, self.latent_channels) if isinstance(latent, Tensor) else latent
        if z.shape[0] != 1:
            raise InputError(f"a stream is of one clip, and the latent holds {z.shape[0]}: give them one by one")
        wanted = check_part(start, frames, self.frames(z.shape[2]))
        shape = self.spatial * z.shape[3], self.spatial * z.shape[4], 3
        results = HandedOn(shape, request.dtype, start, self._block("decoder"))
        return _frames(call.decode(self, z, request, Ticker(progress, cancel), results, wanted, on_plan))

    def decode_raw(self, z: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """The network as it is: unscaled latent [B, C, T, h, w] -> [B, 3, F, H, W], not clamped, on the VAE's device.

        chunk: latents per step, frames: frames per step after the temporal upsamplers (0: all at once).
        """
        z = check_latent(z, self.latent_channels)
        self._plain.set_layout(self._options)
        with self._scope():
            chunks = self._plain.frames(z, Steps(chunk, frames), self.device, no_check)
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
        check: Callable[[], None] = no_check,
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
        devices: Devices = None,
        mixed_devices: bool = False,
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
        batch, height, width = x.shape[0], x.shape[2] // self.spatial, x.shape[3] // self.spatial
        latents = (x.shape[1] - 1) // self.temporal + 1
        moments = torch.empty(batch, 2 * self.latent_channels, latents, height, width)
        out = moments.permute(0, 2, 3, 4, 1)
        several.encode(self, devices, mixed_devices, x, request, out, progress, cancel, on_plan)
        return self.model.sample(moments, seed) * self.scale

    def encode_stream(
        self,
        frames: Iterable[Tensor],
        *,
        count: int | None = None,
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
    ) -> Iterator[Tensor]:
        """The latents of `encode`, for one clip whose frames come from an iterable: [1, C, t, h, w], t >= 1, as they
        are finished.

        frames: [H, W, 3] or [f, H, W, 3] in 0..1 (or uint8) each, taken when they are needed. count: of all of them,
        where it is known: for the total that `progress` is told (else 0), and needed with a seed, whose noise is drawn
        for the whole latent at once. Frames of a few chunks are in memory at any time, and so many as a latent depends
        on. Ending the iterator early frees all that the run holds.
        """
        self._need_encoder()
        if seed is not None and count is None:
            raise InputError("a seed needs the count of all frames: its noise is drawn for the whole clip at once")
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb)
        return self._encoded(frames, count, request, Ticker(progress, cancel), seed, on_plan)

    def _encoded(
        self, frames: Iterable[Tensor], count: int | None, request: Request, ticker: Ticker, seed: int | None,
        on_plan: Callable[[Plan], None] | None,
    ) -> Iterator[Tensor]:  # fmt: skip
        video, noise, part = StreamVideo(frames, self.spatial, count), None, None
        size = video.height // self.spatial, video.width // self.spatial
        if seed is not None:
            noise = self.model.noise((1, self.latent_channels, (count - 1) // self.temporal + 1, *size), seed)
        results = HandedOn((*size, 2 * self.latent_channels), torch.float32, 0, self._block("encoder"))
        with closing(call.encode(self, video, request, ticker, results, range(UNKNOWN), on_plan)) as done:
            for _, first, moments in done:
                if noise is not None:
                    part = noise[:, :, first : first + len(moments)]
                yield self.model.sample(moments.permute(3, 0, 1, 2)[None].contiguous(), noise=part) * self.scale

    def _block(self, half: str) -> int:
        """Results that a stream in blended tiles makes at once: no fewer than each of them depends on, so that what is
        made for that alone does not take longer than they do. 0: all, where each depends on all."""
        program = getattr(self.model, half).program
        reach = sum(program.reach())
        return 0 if math.isinf(reach) else max(math.ceil(reach * program.rate), BLOCK)

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
            return torch.cat(list(self._plain.moments(parts, Steps(chunk, frames), self.device, no_check)), 2)

    def _need_encoder(self) -> None:
        if not self.can_encode:
            raise InputError(f"{self.path or 'this VAE'} holds a decoder only: encoding needs a file with the encoder")


def _frames(done: Iterator[Finished]) -> Iterator[Tensor]:
    with closing(done):
        for finished in done:
            yield finished.results[None]
