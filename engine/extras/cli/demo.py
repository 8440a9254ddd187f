"""`demo`: encode and decode the shipped clip, and measure the difference."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import InputError
from .options import add_vae_options
from .running import load_vae, progress
from .vaes import vae_file

VIDEO, SHEET = "reconstruction.mp4", "contact_sheet.png"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        description="Encode the small clip that ships with the package, decode it again, and show what is left of it.",
        epilog=f"Writes {VIDEO} and {SHEET} (source, reconstruction, difference) into the folder.",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR",
                        help="folder to write to; made if missing")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="write into a folder that holds files already")
    add_vae_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_folder(args.out, args.force)
    from ...loader import demo_clip_path, demo_vae_path
    from ..bench.demo import contact_sheet, run_demo
    from ..media.mp4 import write_mp4
    from ..output.writing import replacing

    args.vae = vae_file(args.vae) or demo_vae_path()
    vae = load_vae(args)
    if not vae.can_encode or not vae.can_decode:
        raise InputError(f"{vae.path}: holds one half of a VAE; the demo needs encoder and decoder")
    demo = run_demo(vae, demo_clip_path(), lambda label: progress(label, args.quiet))
    args.out.mkdir(exist_ok=True)
    write_mp4(args.out / VIDEO, demo.result, demo.fps)
    with replacing(args.out / SHEET) as temporary:
        contact_sheet(demo).save(temporary, format="PNG")
    count, height, width, _ = demo.source.shape
    print(f"{count} frames {width}x{height} through {vae.path.name if vae.path else 'the VAE'}")
    print(f"PSNR     {demo.psnr:.2f} dB (pixels 0..1, peak 1)")
    seconds = f"encode {demo.encode_seconds:.1f} s, decode {demo.decode_seconds:.1f} s"
    print(f"time     {seconds} ({vae.precision} on {vae.device})")
    if demo.peak_bytes is not None:
        what = "reserved on the GPU" if vae.device.type == "cuda" else "of the whole process"
        print(f"memory   peak {demo.peak_bytes / 2**30:.2f} GB {what}")
    print(f"written  {args.out / VIDEO}, {args.out / SHEET}")
    return 0


def check_folder(folder: Path, force: bool) -> None:
    """Check, before any work is done, that a folder can be made and holds no files (unless `force`).

    Raises:
        InputError: it cannot be used.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; --out needs a folder")
    if not folder.exists() and not folder.parent.is_dir():
        raise InputError(f"{folder}: its parent folder does not exist; create {folder.parent} first")
    if folder.is_dir() and not force and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; choose another folder or give --force to write into it")
