"""`calibrate`: measure ranges and 8-bit errors of a VAE's convolutions, and store them for later runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import LINE, InputError, one_line
from .options import add_any_vae, add_device, add_json, add_norm_groups, add_vae, check_json, named_vae
from .running import progress
from .vaes import vae_file

if TYPE_CHECKING:
    from ..eight_bit.table import Table

#: Number of convolutions with the largest errors that are listed.
NAMED = 5


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        description="Measure on a clip what a VAE's convolutions read and what 8 bits cost each of them in dB. fp8, "
        "int8 and a dB floor use the result from then on; without one they measure the first four clips they see.",
        epilog="The result is kept in the pack's cache folder ($ZEROWASTE_CACHE, or the system's place for caches).",
    )
    add_vae(parser, "the small demo VAE", positional=True)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--clip", type=Path, metavar="VIDEO", help="a clip to measure on (default: the demo clip)")
    what.add_argument("--latent", type=Path, metavar="FILE", help="a latent instead; calibrates the decoder only")
    add_any_vae(parser)
    parser.add_argument("--ranges-only", action="store_true", help="leave out what each convolution costs by itself")
    add_json(parser, "the result", "--table")
    add_device(parser)
    add_norm_groups(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ... import log
    from ...loader import demo_clip_path, demo_vae_path, load
    from ..bench.calibrate import calibrate, passes
    from ..media import latent_note
    from ..media.clips import read_video
    from ..media.latents import read_latent
    from ..output.writing import write_text

    if isinstance(args.json, Path) and args.json.suffix.lower() != ".json":
        raise InputError(f"--json {args.json}: the result ends in .json, or is - for standard output")
    check_json(args)
    args.vae = vae_file(named_vae(args))
    if args.vae is None:
        log.warn("no VAE file: the small demo VAE, which is only for trying things out")
    # Load it as 8-bit runs do, in the model's own 16-bit type even on a CPU: ranges are those of 16-bit activations.
    vae = load(args.vae or demo_vae_path(), precision="int8", device=args.device, norm_groups=args.norm_groups)
    if args.latent is None and not vae.can_encode:
        raise InputError(f"{vae.path}: holds a decoder only; give a --latent to calibrate on")
    source = args.latent or args.clip or demo_clip_path()
    latent = read_latent(source, vae) if args.latent else None
    cure = "name the VAE that made it, or allow any with --any-vae"
    latent_note.check(latent_note.found(latent), vae, args.any_vae, str(source), cure)
    video = None if args.latent else read_video(source)[0]
    errors = not args.ranges_only
    total = passes(vae, ("decoder",) if args.latent else ("encoder", "decoder"), errors)
    with progress("calibrate", args.quiet) as report:
        done = iter(range(1, total + 1))
        outcomes = list(calibrate(vae, source.name, video, latent, errors, lambda: report(next(done), total)))
    for outcome in outcomes:
        for line in describe(outcome.half, outcome.table):
            print(one_line(line, LINE))
        for kind, (db, saturated, operands) in outcome.whole.items():
            against = f"{db:.1f} dB against {vae.architecture.native}"
            print(f"  all in {kind}: {against}, {saturated} of {operands} operands saturated")
    if args.json == "-":
        print(vae.store.document(), end="", file=args.stdout)
    elif args.json is not None:
        write_text(args.json, vae.store.document())
    return 0


def describe(half: str, table: Table) -> Iterable[str]:
    """Yield lines about one component's table: its origin, and the convolutions with the largest errors.

    Args:
        half: "encoder" or "decoder".
        table: its measurements.
    """
    from ..eight_bit.sampling import decibel

    yield f"{half}: ranges of {len(table.ranges)} convolutions from {table.source}"
    for kind, errors in table.errors.items():
        worst = sorted(errors, key=errors.__getitem__, reverse=True)[:NAMED]
        listed = ", ".join(f"{key.removeprefix(half + '.')} {decibel(errors[key]):.1f} dB" for key in worst)
        yield f"  costliest alone in {kind}: {listed}"
