"""`plan`: show how a decode or encode would run, and its memory, without running it."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError, PlanError
from ...system.memory import GIB
from ...system.words import many
from .card import Card, add_card, asked, expects, on, words
from .options import (
    add_force,
    add_kernels,
    add_memory_options,
    add_norm_groups,
    add_vae,
    check_json,
    check_least,
    family_of,
    give_json,
    json_target,
    kernels,
    memory_options,
    size,
)
from .parser import YELLOW, paint

if TYPE_CHECKING:
    from ...network.architecture import Architecture
    from ...planning.budget import Limits
    from ...planning.cost import Rates
    from ...planning.plan import Plan
    from ...planning.planner import Planner
    from ...request import Request

#: Targets of --table in GB: the default share of common cards, and smaller ones.
TABLE_GB = (26.0, 19.5, 13.0, 9.75, 8.0, 6.5, 4.0, 3.0)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "plan",
        description="Say how a clip would be decoded or encoded under a memory target. Nothing is computed, so plans "
        "for a GPU can be made without one. `fits` is a table of what fits.",
    )
    parser.add_argument("--size", metavar="WxH", help="frame size in pixels, such as 1280x720 or 720p")
    parser.add_argument("--frames", type=int, metavar="N",
                        help="frames of the clip (default: 81; pictures: 1; Stable Video Diffusion: 25)")  # fmt: skip
    parser.add_argument("--encode", action="store_true", help="plan an encode (default: a decode)")
    add_vae(parser, "seedvr2 in its published sizes")
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
    parser.add_argument("--json", nargs="?", const="-", type=json_target, metavar="FILE",
                        help="also write it as JSON to this file; - (or none) prints it and nothing else")  # fmt: skip
    add_force(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ...network.architecture import colours_of
    from ...options import PLAIN_TILES
    from ...request import Request

    check_json(args, Path(args.vae or ""))
    if args.size is None:
        raise InputError("--size is missing: write --size 1280x720, or `zerowaste-vae fits` for a table of what fits")
    width, height = size(args.size)
    request = Request(**memory_options(args), output=args.output)
    check_least(args, frames=1, devices=1)
    half, card, chosen = "encoder" if args.encode else "decoder", asked(args), kernels(args)
    architecture, config = _network(args, half)
    planner, note = planner_of(architecture, config, half, args.precision, card, chosen, args.plain, args.link)
    wanted = args.frames or (1 if architecture.still else 25 if architecture.joined else 81)
    count, spatial = architecture.filled(wanted), architecture.spatial
    precision = architecture.native if args.precision == "auto" else args.precision
    if min(width, height) < spatial:
        raise InputError(f"--size {args.size}: frames are at least {spatial}x{spatial} pixels")
    # `encode` pads frames to whole latents, and a decode is of such latents.
    whole = spatial * architecture.side
    given, (width, height) = (width, height), (n + -n % whole for n in (width, height))
    latents = architecture.latents(count)
    shape = latents, height // spatial, width // spatial
    plan = functools.partial(planner.plan, half, shape, request)
    rows = [_row(plan, limits, architecture.temporal, planner.walk.rates) for limits in _limits(args, request, card)]
    frames = architecture.frames(latents)
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
    shared = _shared(args, architecture, planner, shape) if args.devices else []
    if args.json is not None:
        answer = {"model": _model(args, architecture), "size": [width, height], "frames": frames,
                  "precision": precision, "result_gb": result / GIB, "variant": architecture.variant(config),
                  "note": note, "plans": rows}  # fmt: skip
        if card:
            answer["card"] = {"name": card.name, "sm": card.sm, "runs": there, "projected": True}
            if time:
                answer["card"]["expected"] = time
        if shared:
            answer["devices"] = [{key: value for key, value in row.items() if key != "text"} for row in shared]
        give_json(args, answer)
        if args.json == "-":
            return 0
    verb = "encode" if args.encode else f"decode to {args.output} ({result / GIB:.2f} GB of host memory)"
    variant = f", {name}" if (name := architecture.variant(config)) else ""
    where = "" if card else f" on {_here(args, chosen)}"
    head = f"{width}x{height}, {many(frames, 'frame')}, {precision}{variant}"
    print(f"{head}: {verb}; {_model(args, architecture)}{where}")
    if note:
        print(note)
    if card:
        print(f"on {card.name}, sm_{card.sm} (projected, not measured): {there}")
    if time:
        print(time)
    for row in rows:
        text = f"{row['target_gb']:6.2f} GB: {row['text']}"
        print(text if row["fits"] else paint(text, YELLOW, sys.stdout))
    for row in shared:
        print(row["text"])
    return 0 if all(row["fits"] for row in rows) or args.table else 2


def _model(args: argparse.Namespace, architecture: Architecture) -> str:
    """Return the name of the planned model: its file's, or its family's with published sizes."""
    if args.vae is not None and family_of(args.vae) is None:
        return f"{Path(args.vae).name} ({architecture.name})"
    return f"{architecture.published.title} ({architecture.name}, published sizes)"


def _here(args: argparse.Namespace, chosen: str) -> str:
    """Return the GPU that a plan without --card is for, its kernels, and where its target comes from."""
    import torch

    aim = "the target that is named" if args.vram_gb or args.table else "what is free now"
    if args.plain:
        return f"any GPU in plain torch, within {aim}"
    if not torch.cuda.is_available():
        return f"any GPU with fused kernels{'' if chosen == 'auto' else f' ({chosen})'}, within {aim}"
    from ...kernels.targets import target

    device = torch.device("cuda")
    return f"{torch.cuda.get_device_name(device)} ({target(device, chosen).words}), within {aim}"


def _limits(args: argparse.Namespace, request: Request, card: Card | None) -> list[Limits]:
    """Return the limits of each plan that is asked for; of a card in the table 81.25 % of its memory."""
    import torch

    from ...planning.budget import DEFAULT_SHARE, Limits, Machine

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


def _network(args: argparse.Namespace, half: str) -> tuple[Architecture, Any]:
    """Return the architecture and the sizes of the named model. half: component to plan for."""
    from ...families import DEFAULT
    from ...loader import load

    family = DEFAULT if args.vae is None else family_of(args.vae)
    if family is None:
        vae = load(args.vae, precision="fp32", device="cpu", norm_groups=args.norm_groups)
        if half == "encoder" and not vae.can_encode:
            raise InputError(f"{args.vae}: holds a decoder only, so there is no encode to plan")
        return vae.architecture, vae.model.config
    config = family.published.config
    if args.norm_groups is not None:
        raise InputError(f"--norm-groups {args.norm_groups} is for a VAE file; name one with --vae, or leave it out")
    if half == "encoder" and config.encoder_widths is None:
        raise InputError(f"--vae {args.vae}: its encoder's sizes are not known here: name a file")
    return family, config


def planner_of(
    architecture: Architecture, config: Any, half: str, precision: str, card: Card | None, chosen: str,
    plain: bool = False, link: float | None = None,
) -> tuple[Planner, str]:  # fmt: skip
    """Return the planner of a model, and a note for the user (may be empty).

    Args:
        architecture, config: of the model.
        half: component to plan for.
        precision: one of `loader.NAMES`.
        card: GPU that is to run it, None: any.
        chosen: which kernels are asked for.
        plain: for plain torch.
        link: as for `_rates`.
    """
    import torch

    from ...loader import NAMES, PRECISIONS
    from ...options import DEFAULTS
    from ...planning.fusable import not_fused, why_no_8_bit
    from ...planning.make import decided, make_planner
    from ...planning.plain_walk import Torch
    from ...precision.modes import MIXED, Mode

    if precision not in NAMES:
        raise InputError(f"--precision {precision} is not one of {', '.join(NAMES)}")
    dtype = PRECISIONS.get(precision) or PRECISIONS[architecture.activations(precision, True)]
    reason = "--plain" if plain else not_fused(architecture.programs(config), dtype)
    native = precision if precision != "auto" else architecture.native
    # Without a card, for the GPU that is here, or for any.
    here = on(card, architecture, config, half, native, chosen) if card else None
    if here and reason is None and not here.kernels:
        reason = here.notes[0]
    options = DEFAULTS.decided(here) if here else decided(replace(DEFAULTS, kernels=chosen), torch.device("cuda"))
    programs = architecture.programs(config)
    launching = any(p.launches and p.why_not_fused() == reason for p in programs)
    note = f"fused kernels off: {reason}" if reason and not (plain or launching) else ""
    exact_only = why_no_8_bit(programs, dtype, reason)
    if precision == "fp16_fast" and any(p.scales for p in programs):
        exact_only = "its products sum in fp32"
    if exact_only and precision in MIXED:
        note = f"{precision} is unavailable ({exact_only}): this is a plan for {architecture.native}"
    exact = dtype == torch.float32
    mode = Mode()
    if exact_only is None and precision in MIXED:  # for any GPU that can run it
        fast = precision == "fp16_fast"
        mode = Mode(half_accumulate=True) if fast else Mode(precision)
    planner = make_planner(
        architecture, config, dtype, options, mode, lambda: reason is None and not exact,
        lambda: Torch(products=exact, reserves=True),  # plans are for a GPU, without TF32
        _rates(link), waits=True,
    )  # fmt: skip
    return planner, note


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
    from ...network.sectioned import results_before
    from ..distributed.shares import SectionLeads, duration, leads_of, split

    program = architecture.program("encoder" if args.encode else "decoder", planner.walk.config)
    latents, (height, width) = size[0], size[1:]
    scale = architecture.spatial if args.encode else 1
    leads, out = leads_of(program, scale * height, scale * width, latents), []
    unit, rate, made = "latents", architecture.temporal, architecture.frames(latents)
    if isinstance(leads, SectionLeads):
        latents, unit = leads.count, "sections"

    def frame(of: int) -> int:
        """Return the first frame of a latent or section."""
        if unit == "latents":
            return results_before(program, of, rate)
        return made if of == latents else architecture.sections.frames * of

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
