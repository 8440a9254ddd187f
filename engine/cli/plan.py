"""`plan`: show how a decode or encode would run, and its memory, without running it."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, PlanError
from ..system.memory import GIB
from .card import Card, add_card, asked, expects, on, words
from .options import (
    add_kernels,
    add_memory_options,
    add_norm_groups,
    add_weights,
    check_least,
    family,
    kernels,
    memory_options,
)

if TYPE_CHECKING:
    from ..archs import Architecture
    from ..planning.budget import Limits
    from ..planning.cost import Rates
    from ..planning.plan import Plan
    from ..planning.planner import Planner
    from ..request import Request

#: Targets of --table in GB: the default share of common cards, and smaller ones.
TABLE_GB = (26.0, 19.5, 13.0, 9.75, 8.0, 6.5, 4.0, 3.0)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "plan",
        description="Say how a clip would be decoded or encoded under a memory target. Without --vae "
        "and --weights: the published SeedVR2 VAE. Nothing is computed, so plans for a GPU can be made without one.",
    )
    parser.add_argument("--size", required=True, metavar="WxH", help="frame size in pixels, such as 1280x720")
    parser.add_argument("--frames", type=int, metavar="N",
                        help="frames of the clip (default: 81; pictures: 1; Stable Video Diffusion: 25)")  # fmt: skip
    parser.add_argument("--encode", action="store_true", help="plan an encode (default: a decode)")
    parser.add_argument("--vae", type=Path, metavar="FILE", help="VAE weights (default: published SeedVR2 widths)")
    add_weights(parser)
    add_norm_groups(parser)
    parser.add_argument("--precision", default="auto", metavar="P",
                        help="auto (default: its own 16-bit type), fp16, bf16, fp32, fp8, int8, fp16_fast")  # fmt: skip
    add_card(parser)
    add_kernels(parser)
    parser.add_argument("--plain", action="store_true", help="for plain torch, where the fused kernels cannot run")
    memory = add_memory_options(parser)
    memory.add_argument("--output", default="float32", metavar="TYPE", help="float32 (default), float16 or uint8")
    memory.add_argument("--table", action="store_true", help="plans for a range of targets")
    parser.add_argument("--devices", type=int, metavar="N",
                        help="also compute what up to N GPUs of one kind would do together")  # fmt: skip
    parser.add_argument("--link", type=float, metavar="GB/s", help="what host memory gives while as much goes back, in "
                        "10^9 bytes (default: as `tune` has measured it here, else 50)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..archs import colours_of
    from ..options import PLAIN_TILES
    from ..request import Request

    width, height = _size(args.size)
    request = Request(**memory_options(args), output=args.output)
    check_least(args, frames=1, devices=1)
    half, card, chosen = "encoder" if args.encode else "decoder", asked(args), kernels(args)
    planner, architecture, note = _planner(args, half, card, chosen)
    wanted = args.frames or (1 if architecture.still else 25 if architecture.joined else 81)
    count, spatial = architecture.filled(wanted), architecture.spatial
    precision = architecture.native if args.precision == "auto" else args.precision
    if min(width, height) < spatial:
        raise InputError(f"--size {args.size}: frames are at least {spatial}x{spatial} pixels")
    # `encode` pads frames to whole latents, and a decode is of such latents.
    whole = spatial * architecture.side
    given, (width, height) = (width, height), (n + -n % whole for n in (width, height))
    latents = architecture.latents(count)
    size = latents, height // spatial, width // spatial
    plan = functools.partial(planner.plan, half, size, request)
    rows = [_row(plan, limits, architecture.temporal, planner.walk.rates) for limits in _limits(args, request, card)]
    frames, config = architecture.frames(latents), planner.walk.config
    asks = card and (card, architecture, config, half, precision, chosen, (width, height, frames))
    there = words(*asks) if asks else ""
    fitting = [row for row in rows if row["fits"]]
    # Of tiles and of plain torch nothing was timed.
    time = expects(*asks) if asks and any(r["tiles"] == 1 and not r["bare"] for r in fitting) else ""
    bare = [row["bare"] and row["tiles"] > 1 for row in fitting]
    if card and planner.walk.why_not(half) is None and not note and any(bare):
        there = PLAIN_TILES if all(bare) else f"{there}; {PLAIN_TILES}"
    if (*given, wanted) != (width, height, frames):
        filled = f"{given[0]}x{given[1]}, {wanted} frames: filled up to {width}x{height}, {frames} frames, as by encode"
        note = f"{filled}; {note}" if note else filled
    result = frames * height * width * colours_of(config)[1] * request.dtype.itemsize
    shared = _shared(args, architecture, planner, size) if args.devices else []
    if args.json:
        answer = {"size": [width, height], "frames": frames, "precision": precision, "result_gb": result / GIB,
                  "variant": architecture.variant(config), "note": note, "plans": rows}  # fmt: skip
        if card:
            answer["card"] = {"name": card.name, "sm": card.sm, "runs": there, "projected": True}
            if time:
                answer["card"]["expected"] = time
        if shared:
            answer["devices"] = [{key: value for key, value in row.items() if key != "text"} for row in shared]
        print(json.dumps(answer, indent=1))
        return 0
    verb = "encode" if args.encode else f"decode to {args.output} ({result / GIB:.2f} GB of host memory)"
    variant = architecture.variant(config)
    print(f"{width}x{height}, {frames} frames, {precision}{f', {variant}' * bool(variant)}: {verb}")
    if note:
        print(note)
    if card:
        print(f"on {card.name}, sm_{card.sm} (projected, not measured): {there}")
    if time:
        print(time)
    for row in rows:
        print(f"{row['target_gb']:6.2f} GB: {row['text']}")
    for row in shared:
        print(row["text"])
    return 0 if all(row["fits"] for row in rows) or args.table else 2


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match is None:
        raise InputError(f"--size {text}: write width x height in pixels, such as 1280x720")
    return int(match[1]), int(match[2])


def _limits(args: argparse.Namespace, request: Request, card: Card | None) -> list[Limits]:
    """Return the limits of each plan that is asked for; of a card in the table 81.25 % of its memory."""
    import torch

    from ..planning.budget import DEFAULT_SHARE, Limits, Machine

    cuda = torch.device("cuda")
    named = [args.vram_gb] if args.vram_gb else []
    if card is not None and card.gpu is not None:
        named = named or [DEFAULT_SHARE * gb for gb in card.gpu.memory]
    if args.table or named:
        host = Machine.bare(cuda, None).host(args.ram_gb)
        return [Limits(int(gb * GIB), host=host) for gb in (TABLE_GB if args.table else named)]
    if card is not None:
        why = f" ({card.why})" if card.why else ""
        raise InputError(f"--card {args.card} does not say how much memory{why}: name a target with --vram-gb, or ask "
                         "for --table")  # fmt: skip
    if not torch.cuda.is_available():
        raise InputError("no CUDA GPU here to plan for: name its memory target with --vram-gb, or ask for --table")
    return [Machine.now(cuda).limits(request)]


def _planner(args: argparse.Namespace, half: str, card: Card | None, chosen: str) -> tuple[Planner, Architecture, str]:
    """Return the planner of the named model, the model's architecture, and a note for the user (may be empty).

    half: component to plan for. card: GPU that is to run it, None: any. chosen: which kernels are asked for.
    """
    import torch

    from ..archs import DEFAULT
    from ..loader import NAMES, PRECISIONS, load
    from ..options import DEFAULTS
    from ..planning.fusable import not_fused, why_no_8_bit
    from ..planning.make import decided, make_planner
    from ..planning.plain_walk import Torch
    from ..precision.modes import MIXED, Mode

    if args.precision not in NAMES:
        raise InputError(f"--precision {args.precision} is not one of {', '.join(NAMES)}")
    if args.vae is None:
        architecture = family(args.weights) if args.weights else DEFAULT
        config = architecture.published.config
        if half == "encoder" and config.encoder_widths is None:
            raise InputError(f"--weights {args.weights}: its encoder's sizes are not known here: name a file, --vae")
    elif args.weights:
        raise InputError(f"--weights {args.weights}: a file is named too; give one of them")
    else:
        vae = load(args.vae, precision="fp32", device="cpu", norm_groups=args.norm_groups)
        if half == "encoder" and not vae.can_encode:
            raise InputError(f"{args.vae}: holds a decoder only, so there is no encode to plan")
        architecture, config = vae.architecture, vae.model.config

    plain = PRECISIONS.get(args.precision)
    dtype = plain or PRECISIONS[architecture.activations(args.precision, True)]
    reason = "--plain" if args.plain else not_fused(architecture.programs(config), dtype)
    native = args.precision if args.precision != "auto" else architecture.native
    # Without a card, for the GPU that is here, or for any.
    here = on(card, architecture, config, half, native, chosen) if card else None
    if here and reason is None and not here.kernels:
        reason = here.notes[0]
    options = DEFAULTS.decided(here) if here else decided(replace(DEFAULTS, kernels=chosen), torch.device("cuda"))
    programs = architecture.programs(config)
    launching = any(p.launches and p.why_not_fused() == reason for p in programs)
    note = f"fused kernels off: {reason}" if reason and not (args.plain or launching) else ""
    exact_only = why_no_8_bit(programs, dtype, reason)
    if args.precision == "fp16_fast" and any(p.scales for p in programs):
        exact_only = "its products sum in fp32"
    if exact_only and args.precision in MIXED:
        note = f"{args.precision} is unavailable ({exact_only}): this is a plan for {architecture.native}"
    exact = dtype == torch.float32
    mode = Mode()
    if exact_only is None and args.precision in MIXED:  # for any GPU that can run it
        fast = args.precision == "fp16_fast"
        mode = Mode(half_accumulate=True) if fast else Mode(args.precision)
    planner = make_planner(
        architecture, config, dtype, options, mode, lambda: reason is None and not exact,
        lambda: Torch(products=exact, reserves=True),  # plans are for a GPU, without TF32
        _rates(args.link), waits=True,
    )  # fmt: skip
    return planner, architecture, note


def _rates(link: float | None) -> Rates:
    """Return the speeds of this machine's GPU; link: GB/s (10^9 bytes) that replace the measured ones."""
    import torch

    from ..tuning import kept

    rates = kept.rates(torch.device("cuda"))
    if link is None:
        return rates
    if not 0 < link < 10_000:
        raise InputError(f"--link {link:g}: give GB/s")
    return replace(rates, link=link * 1e9)


def _shared(
    args: argparse.Namespace, architecture: Architecture, planner: Planner, size: tuple[int, int, int]
) -> list[dict[str, object]]:
    """Return a row for 2, 4, 8 and N GPUs together: computed from the steps' operations, not measured."""
    from ..distributed.shares import SectionLeads, duration, leads_of, split
    from ..network.steps import frames_of

    program = architecture.program("encoder" if args.encode else "decoder", planner.walk.config)
    latents, (height, width) = size[0], size[1:]
    scale = architecture.spatial if args.encode else 1
    leads, out = leads_of(program, scale * height, scale * width, latents), []
    unit, rate, made = "latents", architecture.temporal, architecture.frames(latents)
    if isinstance(leads, SectionLeads):
        latents, unit = leads.count, "sections"

    def frame(of: int) -> int:
        """Return the first frame of a latent or section."""
        return frames_of(of, rate) if unit == "latents" else made if of == latents else architecture.own.frames * of

    for count in sorted({n for n in (2, 4, 8) if n < args.devices} | {args.devices}):
        rates = [1.0] * count
        shares = split(leads, latents, rates)
        times = (latents + leads(0)) / duration(shares, rates)
        parts = [{"first": frame(s.first), "end": frame(s.end), "latents": s.end - s.first,
                  "lead_latents": round(max(s.lead, 0.0), 2)} for s in shares]  # fmt: skip
        each = ", ".join(f"{p['first']}-{p['end'] - 1} ({p['latents']} {unit} + {p['lead_latents']:.1f} of warm-up)"
                         for p in parts)  # fmt: skip
        text = f"{count} GPUs, computed, not measured: {times:.2f} times as fast as one; frames {each}"
        out.append({"devices": count, "split": "segments", "computed_speedup": round(times, 3), "parts": parts,
                    "text": text})  # fmt: skip
    return out


def _row(planned: Callable[..., Plan], limits: Limits, temporal: int, rates: Rates) -> dict[str, object]:
    """Return the row of one plan, or of its refusal. temporal: frames of a latent."""
    gb = limits.target / GIB
    try:
        plan = planned(limits=limits)
    except PlanError as error:
        return {"target_gb": gb, "fits": False, "text": str(error)}
    moved = plan.far_bytes / (plan.steps.latents * temporal) if plan.far_bytes else 0.0
    text = plan.describe()
    if moved:
        least = f"{1e3 * moved / rates.link:.1f} ms at {rates.link / 1e9:g} GB/s"
        text += f"; {moved / GIB:.2f} GB of histories per frame come and go, {least}"
    return {
        "target_gb": gb,
        "fits": True,
        "moved_gb": moved / GIB,
        "peak_gb": plan.peak_bytes / GIB,
        "host_gb": plan.host_bytes / GIB,
        "latents_per_chunk": plan.steps.latents,
        "frames_per_step": plan.steps.frames,
        "tiles": len(plan.grid),
        "parked": plan.parking is not None,
        "bare": plan.bare,
        "note": plan.note,
        "text": text,
    }
