"""`encode`: encode a clip to a latent file."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from . import running
from .options import add_output, add_run_options, rate, settle_output

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...execution.progress import Progress
    from ...vae import VideoVAE
    from ..distributed.ranks import Ranks
    from ..media.clips import Clip


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "encode",
        description="Encode a video, a folder of images or one image to a latent file. Frames are read as they are "
        "needed, so that a clip of any length takes the same memory.",
        epilog="The last frame, row and column are repeated until they fill whole latents of the VAE (`info FILE` says "
        "what one is of); decode cuts that off again. A VAE of pictures takes the images of a folder one by one.",
    )
    parser.add_argument("video", type=Path, metavar="VIDEO", help="video file, folder of images, or image")
    add_output(parser, "OUT", "name.safetensors, or name.latent for ComfyUI")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="first frame to read (default: 0)")
    parser.add_argument("--frames", type=int, metavar="N", help="how many frames to read (default: all that follow)")
    parser.add_argument("--fps", type=rate, help="frame rate to note in the file (default: the video's; images: 24)")
    parser.add_argument("--seed", type=int, help="draw a sample from the posterior (default: its mean)")
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settle_output(args)
    args.out = Path(args.out)
    return running.with_ranks(args, _run, _help)


def _help(args: argparse.Namespace, ranks: Ranks) -> int:
    """Encode, on a rank that writes nothing, its share of what rank 0 makes."""
    from ..media.clips import Clip

    vae = running.load_vae(args, ranks)
    frames = Padded(Clip(args.video, colours(vae)), args.start, args.frames, vae.architecture.filled, vae.spatial)
    asked = ranks.broadcast()
    if asked is not None:
        for _ in _made(args, ranks, vae, frames, *asked):
            pass
    return 0


def _run(args: argparse.Namespace, ranks: Ranks | None) -> int:
    from ..media.clips import Clip
    from ..output.writing import check_target

    if args.out.suffix.lower() not in (".safetensors", ".latent"):
        raise InputError(f"{args.out}: a latent file ends in .safetensors or .latent")
    check_target(args.out, args.force, inputs=(args.video, args.vae))
    running.check_report(args)
    clip = Clip(args.video)
    vae = running.load_vae(args, ranks)
    clip.colours = colours(vae)
    frames = Padded(clip, args.start, args.frames, vae.architecture.filled, vae.spatial)
    started = time.perf_counter()
    with running.progress("encode", args.quiet) as report:
        shape = _written(args, ranks, vae, frames, clip, report)
    if vae.last_report is not None:
        vae.last_report.repeated = frames.repeated
    seconds = time.perf_counter() - started
    height, width = frames.size
    if not args.quiet:
        how = f"{vae.precision} on {vae.device}, encoded in {seconds:.1f} s"
        print(f"{args.out}: latent {'x'.join(map(str, shape))} of {frames.read} frames {width}x{height}, {how}")
    running.give_report(vae, args)
    return 0


def _made(
    args: argparse.Namespace, ranks: Ranks | None, vae: VideoVAE, frames: Padded, at_once: bool,
    count: int | None = None, report: Progress | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Return latents of frames that are read when they are needed, or at once that of all frames.

    count: of frames, for seeds and several devices.
    """
    import torch

    from ...execution.video import Lasting

    if ranks is not None and ranks.rank == 0:
        ranks.broadcast((at_once, count))
    running.check_alike(args, ranks, vae, video=args.video)
    options = {"seed": args.seed, "progress": report, **running.run_options(args, ranks)}
    if at_once:
        return iter([vae.encode(torch.stack(list(frames)), **options)])
    return vae.encode_stream(Lasting(frames), count=count, **options)


def _written(
    args: argparse.Namespace, ranks: Ranks | None, vae: VideoVAE, frames: Padded, clip: Clip, report: Progress
) -> torch.Size:
    """Write latents as they are made of frames as they are read, or of pictures, which are independent, all at once;
    return the latent's shape."""
    import torch

    from ..media.latent_note import note_of
    from ..media.latents import LatentWriter, write_latent

    def notes(**more: str) -> dict[str, str]:
        return {**note_of(vae), **more, "height": str(frames.size[0]), "width": str(frames.size[1])}

    if vae.architecture.still:
        (latent,) = _made(args, ranks, vae, frames, True, report=report)
        write_latent(args.out, latent[:, :, 0], notes())
        return latent[:, :, 0].shape
    count = None
    # Noise is drawn for the whole clip at once, and devices make parts of it.
    if args.seed is not None or ranks is not None or args.devices:
        count = sum(1 for _ in frames)
    if vae.architecture.joined and Path(args.out).suffix.lower() == ".latent":  # ComfyUI has its frames in a batch
        made = torch.cat(list(_made(args, ranks, vae, frames, False, count, report)), 2)[0].movedim(0, 1).contiguous()
        write_latent(args.out, made, notes(fps=str(args.fps or clip.fps), frames=str(frames.read)))
        return made.shape
    with LatentWriter(args.out) as writer:
        for latent in _made(args, ranks, vae, frames, False, count, report):
            writer.write(latent)
        # The rate is known only after all time stamps have been read.
        writer.finish(notes(fps=str(args.fps or clip.fps), frames=str(frames.read)))
    return writer.shape


def colours(vae: VideoVAE) -> int:
    """Return the channels of a pixel to read for a VAE: 4, with alpha, where its encoder takes them, else 3."""
    return 4 if vae.colours[0] == 4 else 3


class Padded:
    """Frames [start, start + count) of a clip (count None: all that follow), padded to whole latents.

    The last row and column are repeated until sizes divide by `spatial`, and the last frame until there are
    `filled(frames)` of them. Raises InputError for a part that the clip does not have."""

    def __init__(
        self, clip: Iterable[Tensor], start: int, count: int | None, filled: Callable[[int], int], spatial: int
    ) -> None:
        if start < 0 or (count is not None and count < 1):
            raise InputError(f"start={start}, frames={count}: they must be at least 0 and at least 1")
        self._clip, self._span = clip, (start, None if count is None else start + count)
        self._filled, self._spatial = filled, spatial
        #: Frames read so far from the clip, and rows and columns of each.
        self.read = 0
        self.size = (0, 0)
        #: Number of times that the last frame was repeated.
        self.repeated = 0

    def __iter__(self) -> Iterator[Tensor]:
        frame = None
        self.read = self.repeated = 0
        ends = (None if n is None else min(n, sys.maxsize) for n in self._span)
        for frame in itertools.islice(self._clip, *ends):
            self.size = tuple(frame.shape[:2])
            frame = _pad(frame, self._spatial)
            self.read += 1
            yield frame
        if frame is None:
            raise InputError(f"start={self._span[0]} is after the clip's last frame")
        self.repeated = self._filled(self.read) - self.read
        for _ in range(self.repeated):
            yield frame


def _pad(frame: Tensor, multiple: int) -> Tensor:
    """Repeat the last row and column of a frame [H, W, C] until its sides divide by `multiple`."""
    import torch

    for axis, size in enumerate(frame.shape[:2]):
        if missing := -size % multiple:
            last = frame.narrow(axis, size - 1, 1)
            frame = torch.cat([frame, *[last] * missing], axis)
    return frame
