"""`encode`: a clip to a latent file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from .options import (
    add_memory_options,
    add_output_options,
    add_vae_options,
    check_report,
    give_report,
    load_vae,
    memory_options,
    progress,
    rate,
)

if TYPE_CHECKING:
    from torch import Tensor


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "encode",
        description="Encode a video, a folder of images or one image to a latent file.",
        epilog="Frames are repeated to 4n+1 and edges to a multiple of 8 pixels; decode cuts that off again. A VAE of "
        "pictures takes the images of a folder one by one.",
    )
    parser.add_argument("video", type=Path, metavar="VIDEO", help="video file, folder of images, or image")
    parser.add_argument("out", type=Path, metavar="OUT", help="name.safetensors, or name.latent for ComfyUI")
    parser.add_argument("--frames", type=int, metavar="N", help="read the first N frames only")
    parser.add_argument("--fps", type=rate, help="frame rate to note in the file (default: the video's; images: 24)")
    parser.add_argument("--seed", type=int, help="draw a sample from the posterior (default: its mean)")
    add_vae_options(parser)
    add_memory_options(parser)
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..files.latents import write_latent
    from ..files.media import read_video
    from ..files.writing import check_target

    if args.out.suffix.lower() not in (".safetensors", ".latent"):
        raise InputError(f"{args.out}: a latent file ends in .safetensors or .latent")
    check_target(args.out, args.force)
    check_report(args)
    if not args.video.exists():
        raise InputError(f"{args.video}: no such file or folder")
    vae = load_vae(args)
    frames, fps = read_video(args.video, args.frames)
    count, height, width, _ = frames.shape
    still = vae.architecture.still
    frames = pad(frames, vae.temporal, vae.spatial)
    started = time.perf_counter()
    with progress("encode", args.quiet) as report:
        latent = vae.encode(frames, seed=args.seed, progress=report, **memory_options(args))
    seconds = time.perf_counter() - started
    notes = {"height": str(height), "width": str(width)}
    if still:
        latent = latent[:, :, 0]
    else:
        notes |= {"fps": str(args.fps or fps), "frames": str(count)}
    write_latent(args.out, latent, notes)
    if not args.quiet:
        shape = "x".join(map(str, latent.shape))
        how = f"{vae.precision} on {vae.device}, encoded in {seconds:.1f} s"
        print(f"{args.out}: latent {shape} of {count} frames {width}x{height}, {how}")
    give_report(vae, args)
    return 0


def pad(frames: Tensor, temporal: int, spatial: int) -> Tensor:
    """Repeat the last frame, row and column of [F, H, W, 3] until frames are temporal * n + 1 and sizes divide."""
    count, height, width, channels = frames.shape
    sizes = (-(-(count - 1) // temporal) * temporal + 1, *(-(-n // spatial) * spatial for n in (height, width)))
    if sizes == (count, height, width):
        return frames
    padded = frames.new_empty(*sizes, channels)
    padded[:count, :height, :width] = frames
    padded[:count, height:, :width] = frames[:, -1:]
    padded[:count, :, width:] = padded[:count, :, width - 1 : width]
    padded[count:] = padded[count - 1]
    return padded
