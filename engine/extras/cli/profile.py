"""`profile`: measure the time of a decode or encode by operator and stage, next to the GPU's speed limit."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from .card import add_ratio, ratio_asked
from .options import (
    add_device,
    add_json,
    add_norm_groups,
    add_vae,
    check_family,
    check_frames,
    check_json,
    check_least,
    give_json,
    size,
)

if TYPE_CHECKING:
    import torch

    from ..bench.ratio import Ratio


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "profile",
        description="Time every operator of a decode or encode of noise: ms per frame, rate, and share of its speed "
        "limit (FLOP at the rate of matrix products plus bytes at that of copies, both measured in the same run).",
    )
    parser.add_argument("half", metavar="HALF", choices=("decode", "encode"), help="what to profile: decode or encode")
    add_vae(parser, "random, which is seedvr2, on a GPU; demo on a CPU; a family has seeded random weights")
    parser.add_argument("--size", metavar="WxH", help="pixels (default: 1280x720; CPU: 64x48)")
    parser.add_argument("--frames", type=int, metavar="N",
                        help="as many as latents decode to (default: 21 or what fits; CPU: 5)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="calls after the first one (default: 3)")
    parser.add_argument("--precision", default="auto", metavar="P", help="auto (CUDA fp16, CPU fp32), fp32, bf16, fp16")
    add_ratio(parser)
    add_device(parser)
    add_norm_groups(parser)
    add_json(parser, "the rows")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ...loader import placement

    device = placement("auto", args.device)
    small = device.type != "cuda"
    check_least(args, runs=1)
    check_json(args, Path(args.vae or ""))
    check_family(args.vae, "random", "demo")
    ratio = ratio_asked(args, device, [args.precision])
    with nullcontext() if ratio is None else ratio.running():
        return _run(args, device, small, ratio)


def _run(args: argparse.Namespace, device: torch.device, small: bool, ratio: Ratio | None) -> int:
    """Profile; ratio: of a card, inside which this runs."""
    from ...loader import load
    from ..bench.profile import profile
    from ..bench.subject import check_size, default_weights, read_weights, seeded_input

    weights = read_weights(args.vae or default_weights(device))
    vae = load(weights, precision=args.precision, device=device, norm_groups=args.norm_groups)
    about, every = vae.architecture, vae.temporal
    frames = args.frames if args.frames is not None else about.filled(1 + (4 if small else 20) // every * every)
    check_frames(about, frames)
    width, height = size(args.size or ("64x48" if small else "1280x720"))
    pixels = check_size(f"{width}x{height}", vae.spatial * about.side)
    if args.half == "encode" and not vae.can_encode:
        raise InputError(f"{args.vae}: holds a decoder only; profile decode")
    data = seeded_input(vae, "decoder" if args.half == "decode" else "encoder", frames, *pixels)
    if ratio is not None:
        from ..bench.ratio.foreign import refuse_foreign
        from ..bench.speed_limit import work

        program = {"decode": "decoder", "encode": "encoder"}[args.half]
        latent = (n // vae.spatial for n in pixels[::-1])
        whole = work(about, vae.model.config, program, about.latents(frames), *latent)
        refuse_foreign(lambda: getattr(vae, args.half)(data), whole.flop)
    found = profile(vae, args.half, data, args.runs)
    print("\n".join(found.lines()))
    if ratio is not None:
        from ..bench.ratio.waits import lines

        print("", f"what waits, {ratio.words}:", *lines(found, ratio), sep="\n")
    give_json(args, found.record())
    return 0
