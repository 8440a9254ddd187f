"""The VAE object: decode and encode clips within a memory target."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .encoding import Encoding, check_note, run
from .errors import InputError
from .execution import results
from .execution.core import Core, no_check
from .execution.guard import scoped
from .execution.job import Job
from .execution.noise import noised
from .execution.progress import Callbacks, Cancel, OnPlan, Progress
from .execution.results import Finished, Kept, Target
from .face import Face, OldNames
from .network.steps import Latents, Steps
from .planning.plan import Plan
from .request import (
    Devices,
    LatentLike,
    NativeBlend,
    NativeTiles,
    Output,
    Range,
    Request,
    Tiling,
    check_frame,
    check_latent,
    check_out,
    check_part,
)
from .runtime.scope import as_usual


class VideoVAE(Face, Encoding, OldNames):
    """A loaded VAE of videos or pictures.

    Latents of `decode` and `encode` are host-scaled (the network's times `scale`), those of the `_raw` pair are the
    network's own. Results lie in host memory. Memory options are in GB (2^30); 0 means automatic.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> VideoVAE:
        """Return a copy with weights of its own and nothing packed."""
        return self._with_model(copy.deepcopy(self.model, memo))

    # -- decode ---------------------------------------------------------------------------------------------------

    @as_usual()
    def plan_decode(
        self,
        latents: int,
        height: int,
        width: int,
        *,
        tiling: Tiling = "auto",
        tile: int = 0,
        overlap: int | None = None,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        output: Output = "float32",
        native_blend: NativeBlend = "assembled",
        native_tiles: NativeTiles = "family",
        range: Range = "unit",
    ) -> Plan:
        """Return the plan that `decode` would follow now.

        Args:
            latents, height, width: latent frames (or pictures), latent rows and columns.
            others: as for `Request`.
        """
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, output, native_blend, range, native_tiles)
        side = self.architecture.side
        return self._plan("decoder", (latents, side * height, side * width), request)

    @as_usual()
    def decode(
        self,
        latent: LatentLike,
        *,
        tiling: Tiling = "auto",
        tile: int = 0,
        overlap: int | None = None,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        output: Output = "float32",
        native_blend: NativeBlend = "assembled",
        native_tiles: NativeTiles = "family",
        range: Range = "unit",
        progress: Progress | bool | None = None,
        cancel: Cancel | None = None,
        on_plan: OnPlan | None = None,
        plan: Plan | None = None,
        out: Tensor | None = None,
        start: int = 0,
        frames: int | None = None,
        seed: int | None = None,
        noise: float | None = None,
        timestep: float | None = None,
        devices: Devices = None,
        mixed_devices: bool = False,
        any_vae: bool = False,
    ) -> Tensor:
        """Decode host-scaled latents to frames.

        Args:
            latent: [B, C, T, h, w] or [C, T, h, w], a tensor or a numpy array; an image VAE takes [B, C, h, w] too, and
                makes one frame of each latent.
            tiling, tile, overlap, chunk, vram_gb, ram_gb, output, native_blend, native_tiles, range: as for `Request`.
            progress: progress(done, total), called after each chunk; True shows a bar of tqdm.
            cancel: cancel() returning true raises Cancelled.
            on_plan: on_plan(plan), called before each plan runs: there are several where memory runs out.
            plan: from `plan_decode` for this call; it runs if it still fits.
            out: a host tensor of the result's shape and type to write into, so that frames can be seen during the run.
            start, frames: decode only frames [start, start + frames) of each clip (None: up to its end), with the bits
                that they have in the whole.
            seed, noise, timestep: for decoders that take them. noise is its share of the latents. None: the file's
                value, else ComfyUI's; for the seed 0. The noise does not depend on the chunks.
            devices: GPUs that share the work, with the same bits: a list of names (or one string with commas), "all",
                or None or "auto" for the VAE's own alone.
            mixed_devices: allow GPUs of different kinds, which are refused otherwise.
            any_vae: take a latent whose note (`latent_note`; set by `encode`, or read from a file) names another VAE.

        Returns:
            [B, t(T-1)+1, s*h, s*w, 3] in 0..1, or with range="signed" in -1..1 and beyond; s, t: `spatial`, `temporal`.

        Raises:
            InputError: a wrong latent or option.
            PlanError: nothing fits the target.
        """
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, output, native_blend, range, native_tiles)
        check_note(latent, self, any_vae)
        z = check_latent(latent, self.latent_channels, self.architecture.still)
        wanted = check_part(start, frames, self.frames(z.shape[2]))
        shape = z.shape[0], len(wanted), self.spatial * z.shape[3], self.spatial * z.shape[4], self.colours[1]
        if out is None:
            out = torch.empty(shape, dtype=request.dtype, device="cpu")
        check_out(out, shape, request.dtype)
        into = out
        if self.architecture.still:  # pictures are frames of one clip
            z = z[:, :, wanted.start : wanted.stop]
            wanted, into = check_part(0, None, shape[0] * shape[1]), out.view(1, -1, *shape[2:])
        vae = self.at(timestep)
        z, inside = noised(z, seed, noise, self.model.config, self.arch)
        z, callbacks = vae.inside(z), Callbacks(progress, cancel, on_plan)
        target = Kept(into, wanted.start, request.signed)
        job = Job("decoder", z, request, target, wanted, tuple(z.shape[2:]), shape[:4], callbacks, inside)
        try:
            for _ in run(vae, devices, mixed_devices, job, plan):
                pass
        finally:
            self._reported(vae)
        return out

    @as_usual()
    def stream(
        self,
        latent: LatentLike | Latents,
        *,
        tiling: Tiling = "auto",
        tile: int = 0,
        overlap: int | None = None,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        output: Output = "float32",
        native_blend: NativeBlend = "assembled",
        native_tiles: NativeTiles = "family",
        range: Range = "unit",
        progress: Progress | bool | None = None,
        cancel: Cancel | None = None,
        on_plan: OnPlan | None = None,
        plan: Plan | None = None,
        start: int = 0,
        frames: int | None = None,
        seed: int | None = None,
        noise: float | None = None,
        timestep: float | None = None,
        devices: Devices = None,
        mixed_devices: bool = False,
        any_vae: bool = False,
    ) -> Iterator[Tensor]:
        """Yield the frames of `decode`, for one clip, as they are finished: [1, f, s*h, s*w, 3], f >= 1.

        Takes the arguments of `decode`; the latent may also be one that is read when it is needed (an
        extras/media/latents.LatentFile). Yielded tensors belong to the caller. Frames of a few chunks are in memory at
        any time; with blended tiles as many as one frame depends on. Several devices make a segment each, and finished
        frames wait for their turn in at most a quarter of the free host memory (or in ram_gb, if that is less); the
        report says how many. Ending the iterator early frees everything that the run holds, on every device.
        """
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, output, native_blend, range, native_tiles)
        if self.architecture.still:
            raise InputError(f"{self.arch} makes pictures, which do not follow each other: decode gives them")
        check_note(latent, self, any_vae)
        values = isinstance(latent, (Tensor, np.ndarray)) or not hasattr(latent, "shape")
        z = check_latent(latent, self.latent_channels) if values else latent
        if z.shape[1] != self.latent_channels:
            raise InputError(f"a latent of this VAE has {self.latent_channels} channels, not {z.shape[1]}")
        if z.shape[0] != 1:
            raise InputError(f"a stream is of one clip, and the latent holds {z.shape[0]}: give them one by one")
        wanted = check_part(start, frames, self.frames(z.shape[2]))
        shape = self.spatial * z.shape[3], self.spatial * z.shape[4], self.colours[1]
        vae = self.at(timestep)
        z, inside = noised(z, seed, noise, self.model.config, self.arch)
        block, room = results.block_of(self.model.decoder.program), results.waiting_room(request.ram_gb)
        target = Target(shape, request.dtype, block, room, signed=request.signed)
        size, callbacks = (1, len(wanted), *shape[:2]), Callbacks(progress, cancel, on_plan)
        job = Job("decoder", z, request, target, wanted, tuple(z.shape[2:]), size, callbacks, inside)
        return scoped(as_usual, self._frames(vae, run(vae, devices, mixed_devices, job, plan)))

    def _frames(self, vae: Core, done: Generator[Finished, None, None]) -> Generator[Tensor, None, None]:
        with closing(done):
            try:
                for finished in done:
                    self._reported(vae)
                    yield finished.results[None]
            finally:
                self._reported(vae)

    def _reported(self, vae: Core) -> None:
        """Make the last report of `vae`, if it has one, this VAE's: `vae` may be a copy at another timestep."""
        if vae.last_report is not None:
            self._own.report = vae.last_report

    @as_usual()
    def decode_raw(self, z: LatentLike, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """Run the network alone: unscaled latent [B, C, T, h, w] -> [B, 3, F, H, W], not clamped, on the VAE's device.

        Args:
            chunk: latents per step (0: all at once).
            frames: frames per step after the temporal upsamplers (0: all at once).
        """
        z = check_latent(z, self.latent_channels, self.architecture.still)
        if self.architecture.in_tiles:  # such networks have no unscaled or unclamped form
            return self.decode(z).movedim(-1, 1).to(self.device)
        if self.model.packing is not None:
            z = self.model.packing.unpack(z)
        check_frame(self.model.decoder.program, *z.shape[3:])
        with self._claimed("decoder") as vae, vae._scope():
            eager = vae._family.get("decoder", vae._plain)
            chunks = eager.frames(z, Steps(chunk, frames), vae.device, no_check)
            return torch.cat([y for part in chunks for y in part], 2)
