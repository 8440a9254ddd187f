"""`tune`: measure schedules on this GPU and keep the fastest."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from .options import add_force, add_kernels, add_norm_groups, add_vae, check_family, kernels, named_vae

if TYPE_CHECKING:
    from ...vae import VideoVAE

#: Smallest and default number of seconds for all measurements.
LEAST, USUAL = 10.0, 120.0


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "tune",
        description="Time a handful of schedules for every kind of layer of a VAE on this GPU, check their numbers, "
        "and keep the fastest: all later runs on this machine use them. Takes two minutes at most. Frames then have "
        "other bits than before, and as before the same ones under every plan.",
    )
    add_vae(parser, "seedvr2; a family runs with its published widths", positional=True)
    parser.add_argument("--precision", default="auto", metavar="P", help="as for decode (default: auto)")
    add_norm_groups(parser)
    parser.add_argument("--device", metavar="D", help="cuda or cuda:N (default: the first GPU)")
    parser.add_argument("--on", nargs="+", default=[], metavar="NAME",
                        help="optimisations, as for decode; winograd has schedules of its own")  # fmt: skip
    add_kernels(parser)
    parser.add_argument("--seconds", type=float, default=USUAL, metavar="S", help="for all of it (default: 120)")
    parser.add_argument("--again", action="store_true", help="also measure layers that are tuned already")
    parser.add_argument("--share", type=Path, metavar="FILE",
                        help="then time a decode and write card, versions, times, dB and schedules: one file to paste "
                        "into an issue")  # fmt: skip
    add_force(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    from ...kernels.probe import proven
    from ..output.writing import check_target
    from ..tuning.tune import lines, tune

    if not LEAST <= args.seconds < 3600:
        raise InputError(f"--seconds {args.seconds:g}: give {LEAST:g} to 3600")
    args.vae = named_vae(args) or "random"
    check_family(args.vae, "random")
    if args.share is not None:
        check_target(args.share, args.force, inputs=(Path(args.vae),))
    vae = _vae(args)
    here = proven(vae.device, vae.options.kernels)
    print(f"{here.name}: schedules for {vae.arch} in {vae.precision}, up to {args.seconds:.0f} s", flush=True)

    def progress(done: int, total: int) -> None:
        print(f"\r{done} of {total} kinds of layers", end="\n" if done == total else "", flush=True)

    if vae.fused() is None:
        raise InputError(f"{vae.arch} in {vae.precision} runs plain torch here; only the fused kernels have schedules")
    options = {"budget": args.seconds, "again": args.again, "progress": progress, "began": began}
    tuning, found = tune(vae.planner.walk, vae.device, **options)
    for line in lines(tuning, found, here):
        print(line)
    if not found.chosen and not found.left:
        print("all layers are tuned already; --again measures them again")
    print(f"{len(tuning.schedules)} kinds of layers are tuned on this GPU, {time.monotonic() - began:.0f} s")
    if args.share is not None:
        _share(args, vae)
    return 0


def _vae(args: argparse.Namespace) -> VideoVAE:
    """Load the VAE; refuse a machine without a GPU before anything is read."""
    import torch

    from ...loader import load, placement

    device = placement("auto", args.device)
    if device.type != "cuda":
        raise InputError("tune needs a CUDA GPU: a CPU runs torch's own operators")
    from ..bench.subject import read_weights

    weights, groups = read_weights(args.vae), args.norm_groups
    vae = load(weights, precision=args.precision, device=torch.device(device), norm_groups=groups)
    vae.options = replace(vae.options.switched(on=args.on), kernels=kernels(args))
    return vae


def _share(args: argparse.Namespace, vae: VideoVAE) -> None:
    from ..bench.share import measured
    from ..output.writing import write_json

    print("timing a decode ...", flush=True)
    device, precision = vae.device, vae.precision
    vae.release()
    write_json(args.share, measured(args.vae, precision, device, args.norm_groups))
    print(f"{args.share}: card, versions, times, dB and schedules; `bench report` makes the table's row of it")
