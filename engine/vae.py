"""The VAE object: decode and encode clips within a memory target."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import InputError
from .execution.core import Core, no_check
from .execution.guard import scoped
from .execution.job import Job
from .execution.noise import noised
from .execution.progress import Callbacks, Cancel, OnPlan, Progress
from .execution.results import Finished, Kept, Target, block_of, waiting_room
from .execution.video import StreamVideo, TensorVideo
from .face import Face, OldNames
from .media import latent_note
from .network.steps import UNKNOWN, Latents, Steps
from .network.stream import spans_of
from .planning.plan import Plan
from .request import Request, check_dense, check_frame, check_latent, check_out, check_part, check_seed, check_video
from .runtime.scope import as_usual

if TYPE_CHECKING:
    from .distributed.several import Devices


class VideoVAE(Face, Core, OldNames):
    """A loaded VAE of videos or pictures.

    Latents of `decode` and `encode` are host-scaled (the network's times `scale`), those of the `_raw` pair are the
    network's own. Results lie in host memory. Memory options are in GB (2^30); 0 means automatic.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> VideoVAE:
        """Return a copy with weights of its own and nothing packed."""
        return self._with_model(copy.deepcopy(self.model, memo))

    # -- decode ---------------------------------------------------------------------------------------------------

    @as_usual()
    def plan_decode(self, latents: int, height: int, width: int, **options: Any) -> Plan:
        """Return the plan that `decode` would follow now.

        Args:
            latents, height, width: latent frames (or pictures), latent rows and columns.
            options: as for `Request`.
        """
        side = self.architecture.side
        return self._plan("decoder", (latents, side * height, side * width), Request(**options))

    @as_usual()
    def decode(
        self,
        latent: Tensor,
        *,
        progress: Progress | None = None,
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
        **options: Any,
    ) -> Tensor:
        """Decode host-scaled latents to frames.

        Args:
            latent: [B, C, T, h, w] or [C, T, h, w]; an image VAE takes [B, C, h, w] too, and makes one frame of each
                latent.
            progress: progress(done, total), called after each chunk.
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
            options: those of `Request`: tiling, tile, overlap, chunk, vram_gb, ram_gb, output, range, native_*.

        Returns:
            [B, t(T-1)+1, s*h, s*w, 3] in 0..1, or with range="signed" in -1..1 and beyond; s, t: `spatial`, `temporal`.

        Raises:
            InputError: a wrong latent or option.
            PlanError: nothing fits the target.
        """
        request = Request(**options)
        latent_note.check(latent_note.found(latent), self, any_vae)
        z = check_latent(latent, self.latent_channels, self.architecture.still)
        wanted = check_part(start, frames, self.frames(z.shape[2]))
        shape = z.shape[0], len(wanted), self.spatial * z.shape[3], self.spatial * z.shape[4], self.colours[1]
        if out is None:
            out = torch.empty(shape, dtype=request.dtype, device="cpu")
        check_out(out, shape, request.dtype)
        into = out
        if self.architecture.still:  # pictures are frames of one clip
            z = z[:, :, wanted.start : wanted.stop]
            wanted, into = range(shape[0] * shape[1]), out.view(1, -1, *shape[2:])
        vae = self.at(timestep)
        z, inside = noised(z, seed, noise, self.model.config, self.arch)
        z, callbacks = vae.inside(z), Callbacks(progress, cancel, on_plan)
        target = Kept(into, wanted.start, request.signed)
        job = Job("decoder", z, request, target, wanted, tuple(z.shape[2:]), shape[:4], callbacks, inside)
        try:
            for _ in _run(vae, devices, mixed_devices, job, plan):
                pass
        finally:
            self._reported(vae)
        return out

    @as_usual()
    def stream(
        self,
        latent: Tensor | Latents,
        *,
        progress: Progress | None = None,
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
        **options: Any,
    ) -> Iterator[Tensor]:
        """Yield the frames of `decode`, for one clip, as they are finished: [1, f, s*h, s*w, 3], f >= 1.

        Takes the arguments of `decode`; the latent may also be one that is read when it is needed (a
        media/latents.LatentFile). Yielded tensors belong to the caller. Frames of a few chunks are in memory at any
        time; with blended tiles as many as one frame depends on. Several devices make a segment each, and finished
        frames wait for their turn in at most a quarter of the free host memory (or in ram_gb, if that is less); the
        report says how many. Ending the iterator early frees everything that the run holds, on every device.
        """
        request = Request(**options)
        if self.architecture.still:
            raise InputError(f"{self.arch} makes pictures, which do not follow each other: decode gives them")
        latent_note.check(latent_note.found(latent), self, any_vae)
        z = check_latent(latent, self.latent_channels) if isinstance(latent, Tensor) else latent
        if z.shape[1] != self.latent_channels:
            raise InputError(f"a latent of this VAE has {self.latent_channels} channels, not {z.shape[1]}")
        if z.shape[0] != 1:
            raise InputError(f"a stream is of one clip, and the latent holds {z.shape[0]}: give them one by one")
        wanted = check_part(start, frames, self.frames(z.shape[2]))
        shape = self.spatial * z.shape[3], self.spatial * z.shape[4], self.colours[1]
        vae = self.at(timestep)
        z, inside = noised(z, seed, noise, self.model.config, self.arch)
        block, room = block_of(self.model.decoder.program), waiting_room(request.ram_gb)
        target = Target(shape, request.dtype, block, room, signed=request.signed)
        size, callbacks = (1, len(wanted), *shape[:2]), Callbacks(progress, cancel, on_plan)
        job = Job("decoder", z, request, target, wanted, tuple(z.shape[2:]), size, callbacks, inside)
        return scoped(as_usual, self._frames(vae, _run(vae, devices, mixed_devices, job, plan)))

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
    def decode_raw(self, z: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """Run the network alone: unscaled latent [B, C, T, h, w] -> [B, 3, F, H, W], not clamped, on the VAE's device.

        Args:
            chunk: latents per step (0: all at once).
            frames: frames per step after the temporal upsamplers (0: all at once).
        """
        z = check_latent(z, self.latent_channels, self.architecture.still)
        if self.architecture.own is not None:  # such networks have no unscaled or unclamped form
            return self.decode(z).movedim(-1, 1).to(self.device)
        if self.model.packing is not None:
            z = self.model.packing.unpack(z)
        check_frame(self.model.decoder.program, *z.shape[3:])
        with self._claimed("decoder") as vae, vae._scope():
            chunks = vae._plain.frames(z, Steps(chunk, frames), vae.device, no_check)
            return torch.cat([y for part in chunks for y in part], 2)

    # -- encode ---------------------------------------------------------------------------------------------------

    @as_usual()
    def plan_encode(
        self, latents: int, height: int, width: int, rest: tuple[int, int] = (0, 0), **options: Any
    ) -> Plan:
        """Return the plan that `encode` would follow now.

        Args:
            latents, height, width: latent frames, rows and columns that the frames become.
            rest: rows and columns of pixels left over, which fill no latent.
            options: as for `Request`.
        """
        self._need_encoder()
        side = self.architecture.side
        return self._plan("encoder", (latents, side * height, side * width), Request(**options), rest)

    @as_usual()
    def encode(
        self,
        video: Tensor,
        *,
        seed: int | None = None,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        on_plan: OnPlan | None = None,
        plan: Plan | None = None,
        devices: Devices = None,
        mixed_devices: bool = False,
        any_range: bool = False,
        moments: bool = False,
        **options: Any,
    ) -> Tensor:
        """Encode frames to a host-scaled latent [B, C, T, H//s, W//s], T = (F - 1) // t + 1.

        Frames beyond t(T - 1) + 1 are not read. The latent carries a note of this VAE (`latent_note`), which
        `write_latent` keeps.

        Args:
            video: [B, F, H, W, 3] or [F, H, W, 3] in 0..1 (or uint8). An image VAE takes [B, H, W, 3] for B clips of
                one frame; one with transparency takes [..., 4], and frames without an alpha channel are opaque.
            seed: None gives the mean, a number a sample.
            any_range: take frames of any range. Otherwise values a little outside 0..1, as sharpening makes them, are
                encoded as they are, and frames clearly of another range (a value above 2, or 1 % of them below -0.1)
                are an InputError.
            moments: return the network's moments [B, 2C, T, h, w] (mean and log of the variance, not scaled), as
                `encode_raw` does, instead of a latent.
            options: as in `decode`, without output. With range="signed" frames are in -1..1, and values beyond are
                taken as they are. Errors are those of `decode`.
        """
        self._need_encoder()
        check_seed(seed)
        if moments and seed is not None:
            raise InputError("moments=True gives no sample: leave the seed out")
        request = Request(**options, output="float32")
        x = check_video(video, self.spatial, self.architecture.still, self.colours[0], any_range, request.signed)
        found = self._moments(x, request, Callbacks(progress, cancel, on_plan), devices, mixed_devices, plan)
        self._left_out(x.shape[1])
        return found if moments else latent_note.marked(self._sampled(found, seed, None), latent_note.note_of(self))

    def _left_out(self, frames: int | None) -> None:
        """Record in the report how many frames at the end fill no latent, and take them off its clip."""
        report = self.last_report
        if frames and report is not None and not self.architecture.pairs:
            report.dropped = max(0, frames - self.frames(self.architecture.latents(frames)))
            batch, given, *size = report.clip
            report.clip = batch, given - report.dropped, *size

    def _moments(
        self, x: Tensor, request: Request, callbacks: Callbacks, devices: Devices = None, mixed: bool = False,
        plan: Plan | None = None,
    ) -> Tensor:  # fmt: skip
        """Encode checked frames to moments [B, 2C, T, h, w]."""
        still, s = self.architecture.still, self.architecture.spatial
        given = TensorVideo(x, still, request.signed)
        latents = self.architecture.latents(given.count)
        size = given.batch, 2 * self.model.config.latent_channels, latents, given.height // s, given.width // s
        moments = torch.empty(size, dtype=torch.float32, device="cpu")
        into = Kept(moments.permute(0, 2, 3, 4, 1), 0)
        job = Job("encoder", given, request, into, range(latents), size[2:], given.size, callbacks)
        for _ in _run(self, devices, mixed, job, plan):
            pass
        return moments[0].unflatten(1, x.shape[:2]).transpose(0, 1) if still else moments

    def _sampled(self, moments: Tensor, seed: int | None, noise: Tensor | None) -> Tensor:
        """Turn moments [B, 2C, T, h, w] into host-scaled latents; see Network.sample."""
        latent = self.model.sample(moments, seed, noise)
        if self.model.packing is not None:
            latent = self.model.packing.pack(latent)
        return latent * self.scale

    @as_usual()
    def encode_stream(
        self,
        frames: Iterable[Tensor],
        *,
        count: int | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        on_plan: OnPlan | None = None,
        plan: Plan | None = None,
        devices: Devices = None,
        mixed_devices: bool = False,
        any_range: bool = False,
        **options: Any,
    ) -> Iterator[Tensor]:
        """Yield the latents of `encode` as they are finished, [1, C, t, h, w], t >= 1, for one clip given as an
        iterable.

        Frames of a few chunks are in memory at any time, and as many as a latent depends on. Networks whose
        memory grows with each frame (Cosmos) keep all of them, and read them first where no count is given. Ending the
        iterator early frees everything that the run holds. Other arguments, and the note on each latent, are as for
        `encode`.

        Args:
            frames: [H, W, 3] or [f, H, W, 3] in 0..1 (or uint8) each, taken when they are needed, and copied then: the
                iterable may fill one buffer again and again.
            count: the number of all frames, if known; another number of frames is an InputError. `progress` needs it
                for its total (else 0), a seed because its noise is drawn for the whole latent at once, and several
                devices to share the clip.
            devices, mixed_devices: as for `encode`. Each device makes a segment at a time, whose frames wait in at most
                a quarter of the free host memory (or in ram_gb, if that is less), with those that its first latent
                depends on.
        """
        self._need_encoder()
        if self.architecture.still:
            raise InputError(f"{self.arch} takes pictures, which do not follow each other: encode takes them")
        check_seed(seed)
        if seed is not None and count is None:
            raise InputError("a seed needs the count of all frames: its noise is drawn for the whole clip at once")
        if count is None and not _alone(self, devices):
            raise InputError("several devices need the count of all frames: each makes parts of the whole clip")
        request, callbacks = Request(**options, output="float32"), Callbacks(progress, cancel, on_plan)
        how = self.spatial, count, self.colours[0], any_range, request.signed
        video = functools.partial(StreamVideo, frames, *how)
        return scoped(as_usual, self._encoded(video, request, callbacks, seed, plan, devices, mixed_devices))

    def _encoded(
        self, given: Callable[[], StreamVideo], request: Request, callbacks: Callbacks, seed: int | None,
        plan: Plan | None, devices: Devices, mixed: bool,
    ) -> Generator[Tensor, None, None]:  # fmt: skip
        video, noise, part, note = given(), None, None, latent_note.note_of(self)
        count = video.count
        size = video.height // self.spatial, video.width // self.spatial
        if seed is not None:
            noise = self.model.noise((1, self.latent_channels, self.architecture.latents(count), *size), seed)
        latents, room = UNKNOWN if count is None else self.architecture.latents(count), waiting_room(request.ram_gb)
        beside = self.temporal * video.frames(0, 0, 1).nbytes
        shape, block = (*size, 2 * self.latent_channels), block_of(self.model.encoder.program)
        into = Target(shape, torch.float32, block, room, beside)
        job = Job("encoder", video, request, into, range(latents), (latents, *size), video.size, callbacks)
        with closing(_run(self, devices, mixed, job, plan)) as done:
            for _, first, moments in done:
                if noise is not None:
                    part = noise[:, :, first : first + len(moments)]
                latent = self._sampled(moments.permute(3, 0, 1, 2)[None].contiguous(), None, part)
                yield latent_note.marked(latent, note)
        if not getattr(devices, "rank", 0):  # torchrun's other ranks end before
            video.end()
        self._left_out(video.count)

    @as_usual()
    def encode_raw(self, x: Tensor, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """Run the network alone: [B, 3, F, H, W] in -1..1 -> moments [B, 2C, T, h, w], on the VAE's device.

        Args:
            chunk: latents per step (0: all at once).
            frames: frames per step before the first downsampler (0: all at once).
        """
        self._need_encoder()
        c = self.colours[0]
        check_dense(x, "a video")
        if x.ndim != 5 or x.shape[1] != c or x.shape[2] < 1 or min(x.shape[3:]) < self.spatial:
            least = f"{self.spatial}x{self.spatial}"
            raise InputError(f"encode_raw takes [B, {c}, F, H, W] of at least {least} pixels, not {list(x.shape)}")
        check_frame(self.model.encoder.program, *(n // self.architecture.spatial for n in x.shape[3:]))
        if self.architecture.own is not None:
            return self._moments(x.movedim(1, -1).cpu(), Request(range="signed"), Callbacks()).to(self.device)
        parts = (x[:, :, a:b] for a, b in spans_of(self.model.encoder.program, x.shape[2], chunk))
        with self._claimed("encoder") as vae, vae._scope():
            return torch.cat(list(vae._plain.moments(parts, Steps(chunk, frames), vae.device, no_check)), 2)

    def _need_encoder(self) -> None:
        if not self.can_encode:
            raise InputError(f"{self.path or 'this VAE'} holds a decoder only: encoding needs a file with the encoder")


def _alone(vae: Core, devices: Devices) -> bool:
    """Check whether a call runs on the VAE's own device alone; then nothing of distributed/ is used, nor imported."""
    one = vae.device.type != "cuda" or torch.cuda.device_count() == 1  # "all" of them
    return devices is None or devices in ("", "auto") or (one and devices == "all")


def _run(vae: Core, devices: Devices, mixed: bool, job: Job, plan: Plan | None) -> Generator[Finished, None, None]:
    """Run a job on one device or on several. Args, yields: those of `distributed.several.run`."""
    if _alone(vae, devices):
        return job.alone(vae, plan)
    from .distributed import several

    return several.run(vae, devices, mixed, job, plan)
