"""Encodes of a VAE object, and what they share with its decodes: one device or several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import InputError
from .execution import results
from .execution.core import Core, no_check
from .execution.guard import scoped
from .execution.job import Job
from .execution.progress import Callbacks, Cancel, OnPlan, Progress
from .execution.results import Finished, Kept, Target
from .execution.video import StreamVideo, TensorVideo
from .network.steps import UNKNOWN, Steps
from .network.stream import spans_of
from .planning.plan import Plan
from .request import (
    NOTE,
    Devices,
    FramesLike,
    LatentLike,
    NativeBlend,
    NativeTiles,
    Range,
    Request,
    Tiling,
    as_tensor,
    check_dense,
    check_frame,
    check_seed,
    check_video,
)
from .runtime.scope import as_usual
from .system.extension import needed, provider


class Notes(Protocol):
    """The point "notes": notes on latents, which name the VAE that made them."""

    def note_of(self, vae: Core) -> dict[str, str]:
        """Return the note of latents that `vae` makes."""

    def marked(self, latent: Tensor, note: dict[str, str]) -> Tensor:
        """Set a note on a new latent, and return it."""

    def check(self, note: dict[str, str], vae: Core) -> None:
        """Raise InputError where another VAE than `vae` has made the latents of a note."""


class Several(Protocol):
    """The point "devices": a job that several devices share."""

    def run(
        self, vae: Core, devices: Devices, mixed: bool, job: Job, plan: Plan | None
    ) -> Generator[Finished, None, None]:
        """Run a job on the given devices; yield the finished results that its target hands on.

        Args:
            vae: the loaded VAE.
            devices: devices or ranks that share the call.
            mixed: allow devices of different kinds, whose bits differ.
            job: what is asked. Where a clip's length is not known, one device encodes alone.
            plan: a plan made before, or None.
        """


class Encoding(Core):
    """The encodes of a VideoVAE, whose docstring says what latents and options are."""

    @as_usual()
    def plan_encode(
        self,
        latents: int,
        height: int,
        width: int,
        rest: tuple[int, int] = (0, 0),
        *,
        tiling: Tiling = "auto",
        tile: int = 0,
        overlap: int | None = None,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        native_blend: NativeBlend = "assembled",
        native_tiles: NativeTiles = "family",
        range: Range = "unit",
    ) -> Plan:
        """Return the plan that `encode` would follow now.

        Args:
            latents, height, width: latent frames, rows and columns that the frames become.
            rest: rows and columns of pixels left over, which fill no latent.
            others: as for `Request`.
        """
        self._need_encoder()
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, "float32", native_blend, range, native_tiles)
        side = self.architecture.side
        return self._plan("encoder", (latents, side * height, side * width), request, rest)

    @as_usual()
    def encode(
        self,
        video: FramesLike,
        *,
        tiling: Tiling = "auto",
        tile: int = 0,
        overlap: int | None = None,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        native_blend: NativeBlend = "assembled",
        native_tiles: NativeTiles = "family",
        range: Range = "unit",
        seed: int | None = None,
        progress: Progress | bool | None = None,
        cancel: Cancel | None = None,
        on_plan: OnPlan | None = None,
        plan: Plan | None = None,
        devices: Devices = None,
        mixed_devices: bool = False,
        any_range: bool = False,
        moments: bool = False,
    ) -> Tensor:
        """Encode frames to a host-scaled latent [B, C, T, H//s, W//s], T = (F - 1) // t + 1.

        Frames beyond t(T - 1) + 1 are not read. The latent carries a note of this VAE (`latent_note`), which
        `write_latent` keeps.

        Args:
            video: [B, F, H, W, 3] or [F, H, W, 3] in 0..1 (or uint8), as a tensor, a numpy array or a list; or PIL
                pictures. An image VAE takes [B, H, W, 3] for B clips of one frame; one with transparency takes
                [..., 4], and frames without an alpha channel are opaque.
            seed: None gives the mean, a number a sample.
            any_range: take frames of any range. Otherwise values a little outside 0..1, as sharpening makes them, are
                encoded as they are, and frames clearly of another range (a value above 2, or 1 % of them below -0.1)
                are an InputError.
            moments: return the network's moments [B, 2C, T, h, w] (mean and log of the variance, not scaled), as
                `encode_raw` does, instead of a latent.
            others: as in `decode`. With range="signed" frames are in -1..1, and values beyond are taken as they are.
                Errors are those of `decode`.
        """
        self._need_encoder()
        check_seed(seed)
        if moments and seed is not None:
            raise InputError("moments=True gives no sample: leave the seed out")
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, "float32", native_blend, range, native_tiles)
        x = check_video(video, self.spatial, self.architecture.still, self.colours[0], any_range, request.signed)
        found = self._moments(x, request, Callbacks(progress, cancel, on_plan), devices, mixed_devices, plan)
        self._left_out(x.shape[1])
        return found if moments else _noted(self)(self._sampled(found, seed, None))

    def _left_out(self, frames: int | None) -> None:
        """Record in the report how many frames at the end fill no latent, and take them off its clip."""
        report = self.last_report
        if frames and report is not None and not self.architecture.pairs:
            latents, architecture = self.architecture.latents(frames), self.architecture
            read = self.frames(latents) if architecture.sections is None else architecture.sections.at(latents)
            report.dropped = max(0, frames - read)
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
        for _ in run(self, devices, mixed, job, plan):
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
        frames: Iterable[FramesLike],
        *,
        count: int | None = None,
        tiling: Tiling = "auto",
        tile: int = 0,
        overlap: int | None = None,
        chunk: int = 0,
        vram_gb: float | None = None,
        ram_gb: float | None = None,
        native_blend: NativeBlend = "assembled",
        native_tiles: NativeTiles = "family",
        range: Range = "unit",
        seed: int | None = None,
        progress: Progress | bool | None = None,
        cancel: Cancel | None = None,
        on_plan: OnPlan | None = None,
        plan: Plan | None = None,
        devices: Devices = None,
        mixed_devices: bool = False,
        any_range: bool = False,
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
        if count is None and not alone(self, devices):
            raise InputError("several devices need the count of all frames: each makes parts of the whole clip")
        request = Request(tiling, tile, overlap, chunk, vram_gb, ram_gb, "float32", native_blend, range, native_tiles)
        callbacks = Callbacks(progress, cancel, on_plan)
        how = self.spatial, count, self.colours[0], any_range, request.signed
        video = functools.partial(StreamVideo, frames, *how)
        return scoped(as_usual, self._encoded(video, request, callbacks, seed, plan, devices, mixed_devices))

    def _encoded(
        self, given: Callable[[], StreamVideo], request: Request, callbacks: Callbacks, seed: int | None,
        plan: Plan | None, devices: Devices, mixed: bool,
    ) -> Generator[Tensor, None, None]:  # fmt: skip
        video, noise, part, noted = given(), None, None, _noted(self)
        count = video.count
        size = video.height // self.spatial, video.width // self.spatial
        if seed is not None:
            noise = self.model.noise((1, self.latent_channels, self.architecture.latents(count), *size), seed)
        latents = UNKNOWN if count is None else self.architecture.latents(count)
        room = results.waiting_room(request.ram_gb)
        beside = self.temporal * video.frames(0, 0, 1).nbytes
        shape, block = (*size, 2 * self.latent_channels), results.block_of(self.model.encoder.program)
        into = Target(shape, torch.float32, block, room, beside)
        job = Job("encoder", video, request, into, range(latents), (latents, *size), video.size, callbacks)
        with closing(run(self, devices, mixed, job, plan)) as done:
            for _, first, moments in done:
                if noise is not None:
                    part = noise[:, :, first : first + len(moments)]
                latent = self._sampled(moments.permute(3, 0, 1, 2)[None].contiguous(), None, part)
                yield noted(latent)
        if not getattr(devices, "rank", 0):  # torchrun's other ranks end before
            video.end()
        self._left_out(video.count)

    @as_usual()
    def encode_raw(self, x: LatentLike, *, chunk: int = 0, frames: int = 0) -> Tensor:
        """Run the network alone: [B, 3, F, H, W] in -1..1 -> moments [B, 2C, T, h, w], on the VAE's device.

        Args:
            chunk: latents per step (0: all at once).
            frames: frames per step before the first downsampler (0: all at once).
        """
        self._need_encoder()
        c, x = self.colours[0], as_tensor(x, "a video")
        check_dense(x, "a video")
        if x.ndim != 5 or x.shape[1] != c or x.shape[2] < 1 or min(x.shape[3:]) < self.spatial:
            least = f"{self.spatial}x{self.spatial}"
            raise InputError(f"encode_raw takes [B, {c}, F, H, W] of at least {least} pixels, not {list(x.shape)}")
        check_frame(self.model.encoder.program, *(n // self.architecture.spatial for n in x.shape[3:]))
        if self.architecture.in_tiles:
            return self._moments(x.movedim(1, -1).cpu(), Request(range="signed"), Callbacks()).to(self.device)
        program = self.model.encoder.program
        x, spans = program.whole(x), spans_of(program, x.shape[2], chunk)
        parts = (x[:, :, a:b] for a, b in spans)
        with self._claimed("encoder") as vae, vae._scope():
            return torch.cat(list(vae._plain.moments(parts, Steps(chunk, frames), vae.device, no_check)), 2)

    def _need_encoder(self) -> None:
        if not self.can_encode:
            raise InputError(f"{self.path or 'this VAE'} holds a decoder only: encoding needs a file with the encoder")


def check_note(latent: Any, vae: Core, any_vae: bool) -> None:
    """Refuse a latent that another VAE has made, by its note, if it has one; any_vae: accept every latent."""
    note = getattr(latent, NOTE, None)
    notes: Notes | None = provider("notes") if note and not any_vae else None
    if notes is not None:
        notes.check(note, vae)


def _noted(vae: Core) -> Callable[[Tensor], Tensor]:
    """Return the function that sets the note of `vae` on its latents."""
    notes: Notes | None = provider("notes")
    return (lambda latent: latent) if notes is None else functools.partial(notes.marked, note=notes.note_of(vae))


def alone(vae: Core, devices: Devices) -> bool:
    """Check whether a call runs on the VAE's own device alone."""
    one = vae.device.type != "cuda" or torch.cuda.device_count() == 1  # "all" of them
    return devices is None or devices in ("", "auto") or (one and devices == "all")


def run(vae: Core, devices: Devices, mixed: bool, job: Job, plan: Plan | None) -> Generator[Finished, None, None]:
    """Run a job on one device or on several. Args, yields: those of `Several.run`."""
    if alone(vae, devices):
        return job.alone(vae, plan)
    several: Several = needed("devices")
    return several.run(vae, devices, mixed, job, plan)
