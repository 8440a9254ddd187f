"""`decode`: a latent file to a clip."""

from __future__ import annotations

import argparse
import os
import time
from fractions import Fraction
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
        "decode",
        description="Decode a latent file (our own .safetensors, or ComfyUI's .latent) to a clip.",
    )
    parser.add_argument("latent", type=Path, metavar="LATENT", help="latent file")
    parser.add_argument(
        "out", metavar="OUT",
        help="name.mp4, name.png (one frame), name.safetensors (`frames` [B,F,H,W,3]; of pictures [B,H,W,3]), or a PNG "
        "folder",
    )  # fmt: skip
    parser.add_argument("--fps", type=rate, help="frame rate of an MP4 (default: the latent file's, else 24)")
    parser.add_argument("--output", metavar="TYPE", help=".safetensors only: float32 (default), float16 or uint8")
    parser.add_argument("--item", type=int, metavar="N", help="which clip of a batch to decode (default: the only one)")
    add_vae_options(parser)
    add_memory_options(parser)
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..files import media
    from ..files.latents import latent_metadata, read_latent
    from ..files.writing import check_target, write_tensors

    kind = _kind(args.out)
    target = check_target(args.out, args.force, folder=kind == "folder")
    check_report(args)
    if args.output and kind != "safetensors":
        raise InputError(f"--output {args.output} is for .safetensors; {args.out} holds 8-bit pixels in any case")
    notes = latent_metadata(args.latent)
    vae = load_vae(args)
    still = vae.architecture.still
    if still and kind == "mp4":
        raise InputError(f"{args.out}: {vae.arch} makes pictures; end it in .png, .safetensors, or / for a folder")
    latent = _pick(read_latent(args.latent, vae.latent_channels, still), args, kind, still)
    if kind == "png" and vae.frames(latent.shape[2]) > 1:
        raise InputError(f"{args.out}: {args.latent} is a clip of several frames; write .mp4, or / for a PNG folder")
    started = time.perf_counter()
    with progress("decode", args.quiet) as report:
        output = args.output or ("float32" if kind == "safetensors" else "uint8")
        frames = vae.decode(latent, output=output, progress=report, **memory_options(args))
    seconds = time.perf_counter() - started
    frames = crop(frames, notes, vae.temporal, vae.spatial)
    fps = args.fps or stored_rate(notes) or media.DEFAULT_FPS
    if kind == "safetensors":
        write_tensors(target, {"frames": frames[:, 0] if still else frames}, {} if still else {"fps": str(fps)})
    elif kind == "mp4":
        media.write_mp4(target, frames[0], fps)
    elif kind == "png":
        media.write_png(target, frames[0, 0])
    else:
        media.write_png_folder(target, frames.flatten(0, 1))
    if not args.quiet:
        batch, count, height, width, _ = frames.shape
        clips = f"{batch} clips of " if batch > 1 else ""
        speed = f" at {float(fps):g} frames/s" if kind == "mp4" else ""
        how = f"{vae.precision} on {vae.device}, decoded in {seconds:.1f} s"
        print(f"{args.out}: {clips}{count} frames {width}x{height}{speed}, {how}")
    give_report(vae, args)
    return 0


def _kind(out: str) -> str:
    suffix = Path(out).suffix.lower()
    if out.endswith(("/", os.sep)) or Path(out).is_dir() or not suffix:
        return "folder"
    if suffix not in (".mp4", ".png", ".safetensors"):
        raise InputError(f"{out}: unknown kind of output; end it in .mp4, .png, .safetensors, or in / for a PNG folder")
    return suffix[1:]


def _pick(latent: Tensor, args: argparse.Namespace, kind: str, still: bool) -> Tensor:
    count = latent.shape[0]
    if args.item is not None:
        if not 0 <= args.item < count:
            raise InputError(f"--item {args.item}: {args.latent} holds {count} clip(s), numbered from 0")
        return latent[args.item : args.item + 1]
    if count > 1 and kind != "safetensors" and not (still and kind == "folder"):
        raise InputError(f"{args.latent}: holds {count} clips; choose one with --item N, or write .safetensors")
    return latent


def stored_rate(notes: dict[str, str]) -> Fraction | None:
    """The frame rate `encode` noted in the latent file, None where there is none."""
    try:
        fps = Fraction(notes["fps"])
    except (KeyError, ValueError, ZeroDivisionError):
        return None
    return fps if fps > 0 else None


def crop(frames: Tensor, notes: dict[str, str], temporal: int, spatial: int) -> Tensor:
    """Cut off what `encode` had to add to reach whole latents; frames [B, F, H, W, 3].

    Sizes in the notes that padding cannot explain belong to another clip and are left alone.
    """
    steps = {"frames": (1, temporal), "height": (2, spatial), "width": (3, spatial)}
    for name, (axis, step) in steps.items():
        size = int(notes[name]) if notes.get(name, "").isdecimal() else 0
        if 0 < size <= frames.shape[axis] < size + step:
            frames = frames.narrow(axis, 0, size)
    return frames
