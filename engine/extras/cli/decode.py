"""`decode`: decode a latent file to a clip."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from ... import log
from ...errors import InputError
from . import running
from .options import CURE, add_any_vae, add_output, add_run_options, frame_rate, memory_options, rate, settle_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ...network.tiles import Grid
    from ...planning.plan import Plan
    from ...precision.policy import Policy
    from ...vae import VideoVAE
    from ..distributed.ranks import Ranks
    from ..media.latents import LatentFile
    from ..media.mp4 import Format, Mp4Writer
    from ..media.pngs import PngWriter

#: Ends of the names of outputs; names without an end are PNG folders.
KINDS = (".mp4", ".png", ".safetensors")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "decode",
        description="Decode a latent file (our own .safetensors, or ComfyUI's .latent) to a clip. Latents are read and "
        "frames written as they are needed and made, so that a clip of any length takes the same memory. Several "
        "GPUs take turns with segments, and finished frames wait for theirs in a quarter of the free memory at most.",
        epilog="An unfinished OUT is kept beside its place with .part in its name: an MP4 that plays, or a folder. The "
        "same command with --resume goes on from there.",
    )
    parser.add_argument("latent", type=Path, metavar="LATENT", help="latent file")
    add_output(parser, "OUT", "name.mp4, name.png (one frame), name.safetensors (`frames` [B,F,H,W,3]; of pictures "
               "[B,H,W,3]), or a PNG folder")  # fmt: skip
    parser.add_argument("--fps", type=rate, help="frame rate of an MP4 (default: the latent file's, else 24)")
    parser.add_argument("--output", metavar="TYPE", help=".safetensors only: float32 (default), float16 or uint8")
    parser.add_argument("--item", type=int, metavar="N", help="which clip of a batch to decode (default: the only one)")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="first frame to decode (default: 0)")
    parser.add_argument("--frames", type=int, metavar="N", help="how many frames to decode (default: all that follow)")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted decode to OUT has stopped")
    add_any_vae(parser)
    taken = parser.add_argument_group("decoders that take noise and a timestep (LTX-Video 0.9.1 to 0.9.8)")
    taken.add_argument("--seed", type=int, metavar="N",
                       help="of the noise (default: 0; LTX-2.5: the noise that ComfyUI draws)")  # fmt: skip
    taken.add_argument("--noise", type=float, metavar="X", help="its share of the latents (default: the file's, 0.025)")
    taken.add_argument("--timestep", type=float, metavar="X", help="default: the file's, else 0.05")
    video = parser.add_argument_group("MP4")
    video.add_argument("--codec", metavar="C", help="h264 (default), h265 or av1")
    video.add_argument("--crf", type=int, metavar="N",
                       help="quality, 0 is best (default: 12 for h264, 14 h265, 18 av1)")  # fmt: skip
    video.add_argument("--pixels", metavar="P",
                       help="yuv420p (default), yuv444p, yuv420p10 or yuv444p10 (10 bits)")  # fmt: skip
    video.add_argument("--audio", type=Path, metavar="FILE", help="a file whose sound goes with the frames")
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settle_output(args)
    return running.with_ranks(args, _run, _help)


def _help(args: argparse.Namespace, ranks: Ranks) -> int:
    """Decode, on a rank that writes nothing, its share of what rank 0 is asked for."""
    from ..media.latents import LatentFile

    vae = running.load_vae(args, ranks)
    latent = LatentFile(args.latent, vae, args.item)
    asked = ranks.broadcast()
    if asked is not None:
        part, at_once = asked
        for _ in Job(args, ranks, vae, latent, {}).made(at_once, **part):
            pass
    return 0


def _run(args: argparse.Namespace, ranks: Ranks | None) -> int:
    from ..media import latent_note
    from ..media.clips import DEFAULT_FPS
    from ..media.latents import LatentFile, latent_metadata
    from ..media.mp4 import Format, part_of
    from ..media.mp4_finish import check_audio
    from ..output.locks import held
    from ..output.writing import check_target

    kind = _kind(args.out)
    there = args.resume and not args.force and _whole(args.out, kind)
    target = check_target(args.out, args.force or there, kind == "folder", (args.latent, args.vae, args.audio))
    running.check_report(args)
    if args.output and kind != "safetensors":
        raise InputError(f"--output {args.output} is for .safetensors; {args.out} holds whole numbers in any case")
    if kind in ("safetensors", "png") and args.resume:
        raise InputError(f"--resume is for .mp4 and PNG folders; {args.out} is written at once")
    notes = latent_metadata(args.latent)
    fps = args.fps or stored_rate(notes) or DEFAULT_FPS
    if kind != "mp4":
        video = ("codec", "crf", "pixels", "audio", *(() if kind == "safetensors" else ("fps",)))
        if given := [f"--{name}" for name in video if getattr(args, name) is not None]:
            raise InputError(f"{given[0]} is for .mp4; {args.out} has no place for it: leave it out")
    form = Format(fps, args.codec or "h264", args.crf, args.pixels or "yuv420p") if kind == "mp4" else None
    if args.audio is not None:
        check_audio(args.audio)
    if kind in ("mp4", "folder"):
        part = part_of(target)
        if args.resume and not part.exists() and not there:
            log.warn(f"--resume: there is no {part}, so this decode begins with the first frame")
        if part.exists() and not (args.resume or args.force):
            with held(part):
                raise InputError(f"{part}: an interrupted run has left it; give --resume to continue it, or --force "
                                 "to start over")  # fmt: skip
    vae = running.load_vae(args, ranks)
    latent_note.check(latent_note.in_metadata(notes), vae, args.any_vae, str(args.latent), CURE)
    still = vae.architecture.still
    if still and kind == "mp4":
        raise InputError(f"{args.out}: {vae.arch} makes pictures; end it in .png, .safetensors, or / for a folder")
    latent = LatentFile(args.latent, vae, args.item)
    job = Job(args, ranks, vae, latent, notes)
    clips = job.latent.shape[0]
    if clips > 1 and kind != "safetensors" and not (still and kind == "folder"):
        raise InputError(f"{args.latent}: holds {clips} clips; choose one with --item N, or write .safetensors")
    if kind == "png" and job.count > 1:
        raise InputError(f"{args.out}: {args.latent} is a clip of several frames; write .mp4, or / for a PNG folder")
    if there:
        job.say_complete(form)
        if ranks is not None:
            ranks.broadcast(None)
        return 0
    if still and args.resume:
        log.warn(f"{args.out}: pictures are decoded and written all at once; --resume finds nothing and starts over")
    began = time.perf_counter()
    at_once = still or kind in ("safetensors", "png")
    shape, resumed = (job.at_once(target, kind, fps), 0) if at_once else job.by_and_by(target, form)
    if not args.quiet:
        clips, count, height, width, _ = shape
        said = f"{args.out}: {f'{clips} clips of ' if clips > 1 else ''}{count} frames {width}x{height}"
        said += f" at {float(fps):g} frames/s" if kind == "mp4" else ""
        said += f", {vae.precision} on {vae.device}"
        said += f", {resumed} of them from the interrupted run, the others" if resumed else ","
        said += f" decoded in {time.perf_counter() - began:.1f} s"
        if vae.last_report is not None and vae.last_report.lead:
            said += f", with {vae.last_report.lead} earlier latents computed again for their history"
        print(said)
    running.give_report(vae, args)
    return 0


@dataclass
class Job:
    """A decode as a command line asks for it.

    Args:
        args: of the command.
        ranks: of torchrun, or None.
        vae: the loaded VAE.
        latent: the opened latent file.
        notes: its metadata.
    """

    args: argparse.Namespace
    ranks: Ranks | None
    vae: VideoVAE
    latent: LatentFile
    notes: dict[str, str]

    def made(self, at_once: bool, **part: object) -> Iterator[Tensor]:
        """Return the wanted frames as they are finished, or all at once; other ranks send theirs to rank 0."""
        running.check_alike(self.args, self.ranks, self.vae, latent=self.args.latent)
        options = {**running.run_options(self.args, self.ranks), **part, "any_vae": True}  # rank 0 has checked
        if at_once:
            return iter([self.vae.decode(self.latent.read(), **options)])
        return self.vae.stream(self.latent, **options)

    def _decoded(self, at_once: bool, callbacks: dict[str, object], **part: object) -> Iterator[Tensor]:
        """Return frames as `made` does, and send the request to other ranks first."""
        part |= _taken(self.args)
        if self.ranks is not None:
            self.ranks.broadcast((part, at_once))
        return self.made(at_once, **callbacks, **part)

    def at_once(self, target: Path, kind: str, fps: Fraction) -> tuple[int, ...]:
        """Decode with all frames in memory, for pictures, .png and .safetensors, and write them; return their shape."""
        from ..media.pngs import write_png, write_png_folder
        from ..output.writing import write_tensors

        args, still = self.args, self.vae.architecture.still
        output = args.output or ("float32" if kind == "safetensors" else "uint8")
        with running.progress("decode", args.quiet) as report:
            (frames,) = self._decoded(True, {"progress": report}, output=output, start=args.start, frames=self.count)
        frames = crop(frames, self.notes, self.vae.spatial)
        if kind == "png":
            write_png(target, frames[0, 0])
        elif kind == "folder":
            write_png_folder(target, frames.flatten(0, 1))
        else:
            write_tensors(target, {"frames": frames[:, 0] if still else frames}, {} if still else {"fps": str(fps)})
        return tuple(frames.shape)

    def by_and_by(self, target: Path, form: Format | None) -> tuple[tuple[int, ...], int]:
        """Decode to an MP4 or (form None) a PNG folder chunk by chunk; return the frames' shape and the number of those
        that were there."""
        from ..media.mp4 import Mp4Writer
        from ..media.pngs import PngWriter

        args, vae, count = self.args, self.vae, self.count
        plan, policy = self._plan()
        identity = self._identity(form, plan, policy)
        writer: Mp4Writer | PngWriter
        if form is None:
            writer = PngWriter(target, args.start, identity, args.resume, args.force)
        else:
            writer = Mp4Writer(target, form, identity, args.resume, force=args.force)
        resumed = writer.done
        try:
            with writer, running.progress("decode", args.quiet) as report:
                if resumed < count:
                    output = "float32" if form is not None and form.deep else "uint8"
                    part = {"output": output, "start": args.start + resumed, "frames": count - resumed}
                    if self.ranks is None:  # ranks plan for themselves
                        part["plan"] = plan if plan.tiled else None
                    callbacks = {"progress": report, "on_plan": _keeps_to(plan, writer)}
                    for frames in self._decoded(False, callbacks, **part):
                        writer.write(crop(frames, self.notes, vae.spatial)[0])
                elif self.ranks is not None:
                    self.ranks.broadcast(None)
            writer.finish(*() if form is None else (args.audio, args.start / form.fps))
        except BaseException:
            if writer.done:
                print(f"{writer.part}: {writer.done} of {count} frames; the same command with --resume goes on from "
                      "there", file=sys.stderr)  # fmt: skip
            raise
        return (1, count, *self._sides(), vae.colours[1]), resumed

    def say_complete(self, form: Format | None) -> None:
        """Print that nothing is left to resume. Raises InputError where OUT cannot be this decode's result."""
        from ..media.clips import Clip
        from ..media.mp4_format import PIXELS

        out = self.args.out
        count = self.latent.shape[0] if self.vae.architecture.still else self.count
        height, width = self._sides()
        clip = Clip(Path(out))
        found = (clip.count, *next(iter(clip)).shape[:2])
        even = form is not None and PIXELS[form.pixels][2]  # colours of half the size
        if found != (count, height + height % 2 * even, width + width % 2 * even):
            raise InputError(f"{out}: is another clip ({found[0]} frames of {found[2]}x{found[1]}, not {count} of "
                             f"{width}x{height}); choose another name or give --force to replace it")  # fmt: skip
        if not self.args.quiet:
            print(f"{out}: is complete ({count} frames {width}x{height}), nothing is left to resume; --force decodes "
                  "it again")  # fmt: skip

    @functools.cached_property
    def count(self) -> int:
        """Return the number of frames to decode, without those that `encode` had to add."""
        from ...request import check_part

        count, noted = self.vae.frames(self.latent.shape[2]), _number(self.notes, "frames")
        if 0 < noted <= count == self.vae.architecture.filled(noted):
            count = noted
        return len(check_part(self.args.start, self.args.frames, count))

    def _sides(self) -> tuple[int, ...]:
        """Return the rows and columns of frames, without those that `encode` had to add."""
        step = self.vae.spatial
        sides = zip(("height", "width"), (step * n for n in self.latent.shape[3:]), strict=True)
        return tuple(int(self.notes[name]) if _noted(self.notes, name, n, step) else n for name, n in sides)

    def _plan(self) -> tuple[Plan, Policy]:
        """Return the plan of the whole clip, and the policy of its operands."""
        from ...execution.call import decoder_samples

        way = self.vae.at(self.args.timestep)
        policy = way.settled("decoder", functools.partial(decoder_samples, self.latent))
        return way.plan_decode(*self.latent.shape[2:], **memory_options(self.args)), policy

    def _identity(self, form: Format | None, plan: Plan, policy: Policy) -> str:
        """Return a hash of all that the bits of frames depend on, which an unfinished file and its rest must share."""
        import torch

        from ...kernels.conv3d.tuned import table
        from ..distributed.consistency import of_bits, of_file
        from ..distributed.devices import kind_of

        args, vae = self.args, self.vae
        files = [of_file(path) for path in (args.latent, vae.path)]
        way = vae.precision, of_bits(vae), kind_of(vae.device), args.norm_groups
        if vae.device.type == "cpu":  # the order of sums depends on the number of threads and the length of vectors
            way += torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
        # 8-bit ranges grow with every clip that a file is used on.
        way += () if plan.own is None else plan.own.way
        way += _tiles(plan), plan.fused, json.dumps(policy.as_dict(), sort_keys=True)
        here = vae.kernels("decoder")
        way += torch.__version__, sorted(map(repr, table(vae.device, here.way).items() if here else ()))
        text = repr((*files, args.item, args.start, self.count, *way, form, *_taken(args).items()))
        return "zerowaste " + hashlib.sha256(text.encode()).hexdigest()[:32]


def _whole(out: str, kind: str) -> bool:
    """Check that an output exists, and no unfinished part of it."""
    from ..media.mp4 import part_of

    path = Path(out)
    there = path.is_file() if kind == "mp4" else kind == "folder" and any(path.glob("frame_*.png"))
    return there and not part_of(path).exists()


def _tiles(plan: Plan) -> Grid | None:
    """Return the plan's tiles, None for whole frames, which are equal for all bands and chunks."""
    return plan.grid if plan.tiled else None


def _keeps_to(first: Plan, writer: Mp4Writer | PngWriter) -> Callable[[Plan], None]:
    """Return a check of plans that refuses to resume after frames that were made in other tiles."""
    resumed = writer.done

    def check(plan: Plan) -> None:
        if resumed and _tiles(plan) != _tiles(first):
            raise InputError(f"{writer.part}: the memory that is free now needs other tiles than its frames have; free "
                             "some, or give --force to start over")  # fmt: skip

    return check


def _taken(args: argparse.Namespace) -> dict[str, object]:
    """Return the options for noise and timestep that are given."""
    given = {name: getattr(args, name) for name in ("seed", "noise", "timestep")}
    return {name: value for name, value in given.items() if value is not None}


def _kind(out: str) -> str:
    suffix = Path(out).suffix.lower()
    if Path(out).name.lower() in KINDS and not Path(out).is_dir():
        raise InputError(f"{out}: is only the end of a file's name; put a name before it")
    if out.endswith(("/", os.sep)) or Path(out).is_dir() or not suffix:
        return "folder"
    if suffix not in KINDS:
        raise InputError(f"{out}: unknown kind of output; end it in .mp4, .png, .safetensors, or in / for a PNG folder")
    return suffix[1:]


def stored_rate(notes: dict[str, str]) -> Fraction | None:
    """Return the frame rate that `encode` noted in the latent file's metadata, None where there is none."""
    return frame_rate(notes.get("fps", ""))


def crop(frames: Tensor, notes: dict[str, str], spatial: int) -> Tensor:
    """Cut off the rows and columns that `encode` had to add to fill whole latents.

    Args:
        frames: [B, F, H, W, 3].
        notes: metadata of the latent file.
        spatial: pixels of a latent pixel's side.
    """
    for axis, name in ((2, "height"), (3, "width")):
        if _noted(notes, name, frames.shape[axis], spatial):
            frames = frames.narrow(axis, 0, int(notes[name]))
    return frames


def _noted(notes: dict[str, str], name: str, size: int, step: int) -> bool:
    """Check that the notes hold a size that padding raises to `size`; other sizes belong to another clip."""
    noted = _number(notes, name)
    return 0 < noted <= size < noted + step


def _number(notes: dict[str, str], name: str) -> int:
    """Return a whole number from the notes; 0 where there is none."""
    text = notes.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 20 else 0  # Python refuses to read thousands of digits
