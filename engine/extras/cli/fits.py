"""`fits`: which VAEs fit a card, at which sizes and lengths, and how long decodes are expected to take there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError, PlanError
from ...system.memory import GIB
from .card import Card, add_card, asked, on
from .options import add_json, add_vae, check_json, check_least, family_of, give_json, named_vae, size
from .parser import YELLOW, heading, paint
from .plan import planner_of
from .vaes import files, folders

if TYPE_CHECKING:
    from ...kernels.targets import Target
    from ...network.architecture import Architecture
    from ...planning.budget import Limits

#: Sizes that are asked for by default, of videos and of pictures, and frames of a clip (of VAEs that decode it whole).
CLIPS, PICTURES = ("1280x720", "1920x1080"), ("1024x1024", "2048x2048")
FRAMES, JOINED = 81, 25
_HEADS = ("VAE", "size", "frames", "decode", "expected (computed)")


@dataclass(frozen=True)
class Model:
    """A VAE to plan for: its name for people, its family and its sizes."""

    name: str
    architecture: Architecture
    config: Any


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "fits",
        description="Print a table: which VAEs decode on a card within its memory, at which sizes and lengths, and how "
        "long that is expected to take. Nothing is run. The VAEs are yours in models/vae, by their files' names; "
        "without any, all families.",
        epilog="Seconds are computed from times measured at a card's ratio, never on that card (docs/ratio.md); "
        "without an entry there it says: not timed.",
    )
    add_vae(parser, "yours in models/vae, else all families", positional=True)
    add_card(parser)
    parser.add_argument("--vram-gb", type=float, metavar="GB",
                        help="memory target (default: 81.25 %% of the card's)")  # fmt: skip
    parser.add_argument("--size", nargs="+", metavar="WxH", help="sizes (default: 1280x720 and 1920x1080; pictures "
                        "1024x1024 and 2048x2048)")  # fmt: skip
    parser.add_argument("--frames", type=int, metavar="N",
                        help="frames of a clip (default: 81; Stable Video Diffusion: 25)")  # fmt: skip
    parser.add_argument("--precision", default="auto", metavar="P", help="as for decode (default: auto)")
    add_json(parser, "the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json(args)
    check_least(args, frames=1)
    card, where, limits = _card(args)
    models, why = _models(named_vae(args))
    rows = [row for model in models for row in _rows(model, args, card, limits)]
    print(f"{where}; {why}")
    for line in _table(rows):
        print(line)
    give_json(args, {"card": where, "vaes": why, "rows": rows})
    return 0


def _card(args: argparse.Namespace) -> tuple[Card, str, Limits]:
    """Return the card that is meant, a text about it, and the limits of a run there. Raises InputError where its memory
    is not known."""
    import torch

    from ...kernels.gpus import find
    from ...planning.budget import DEFAULT_SHARE, Limits, Machine
    from ...request import check_sizes

    check_sizes(args.vram_gb, None)
    card, here = asked(args), False
    if card is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        card, here = Card(torch.cuda.get_device_name(), 10 * major + minor), True
        with suppress(InputError):  # of a card whose name nobody knows, CUDA alone says something
            card = card._replace(gpu=find(card.name, "--card").gpu)
    if card is None:
        raise InputError('no CUDA GPU here: name one, such as --card "RTX 5070 Ti", or sm_86 with --vram-gb')
    total = torch.cuda.mem_get_info()[1] / GIB if here else card.gpu.memory[0] if card.gpu else None
    if total is None and not args.vram_gb:
        why = f" ({card.why})" if card.why else ""
        raise InputError(f"--card {args.card} does not say how much memory{why}: name a target with --vram-gb")
    sold = card.gpu.memory if card.gpu and not here else ()
    several = f"; --card with {' GB or '.join(map(str, sold[1:]))} GB for the other" if sold[1:] else ""
    share = f"{100 * DEFAULT_SHARE:g} % of {total:.4g} GB{several}" if total else ""
    gb, said = (args.vram_gb, "as named") if args.vram_gb else (DEFAULT_SHARE * total, share)
    where = f"{card.name}, sm_{card.sm} ({'here' if here else 'not here'}), target {gb:.2f} GB ({said})"
    host = Machine.bare(torch.device("cuda"), None).host(None)
    return card, where, Limits(int(gb * GIB), host=host)


def _models(text: str | None) -> tuple[list[Model], str]:
    """Return the VAEs to plan for, and where they come from."""
    from ...families import ARCHITECTURES, by_file

    if text is not None:
        family = family_of(text) or by_file(Path(text).name)
        if family is None:
            raise InputError(f"{text}: its name tells no family; `zerowaste-vae info {text}` reads it")
        return [_model(text, family)], "the VAE that is named"
    found = [(path.name, by_file(path.name)) for path in files()]
    if known := [_model(name, family) for name, family in found if family is not None]:
        more = len(found) - len(known)
        rest = f", {more} more whose names tell no family" if more else ""
        return known, f"VAEs of {', '.join(map(str, folders()))}{rest}"
    return [_model(a.published.title, a) for a in ARCHITECTURES], "all families: no models/vae with VAEs is here"


def _model(name: str, family: Architecture) -> Model:
    return Model(name, family, family.published.sizes(name))


def _rows(model: Model, args: argparse.Namespace, card: Card, limits: Limits) -> Iterator[dict[str, Any]]:
    """Yield the rows of a VAE, one for each size."""
    from ...request import Request

    a = model.architecture
    count = 1 if a.still else args.frames or (JOINED if a.joined else FRAMES)
    sizes = [size(text) for text in args.size or (PICTURES if a.still else CLIPS)]
    planner, note = planner_of(a, model.config, "decoder", args.precision, card, "auto")
    precision = a.native if args.precision == "auto" else args.precision
    here = on(card, a, model.config, "decoder", precision)
    whole = a.spatial * a.side
    for width, height in sizes:
        if min(width, height) < whole:
            raise InputError(f"--size {width}x{height}: frames of {model.name} are at least {whole}x{whole} pixels")
        padded = [n + -n % whole for n in (height, width)]
        latents = a.latents(a.filled(count))
        shape = latents, *(n // a.spatial for n in padded)
        row: dict[str, Any] = {"vae": model.name, "family": a.name, "precision": precision,
                               "size": [width, height], "frames": count}  # fmt: skip
        try:
            plan = planner.plan("decoder", shape, Request(), limits)
        except PlanError as error:
            yield row | {"fits": False, "decode": "does not fit", "expected": "", "why": str(error)}
            continue
        exact = f"whole frames, {plan.peak_bytes / GIB:.1f} GB"
        parked = f", {plan.host_bytes / GIB:.1f} GB of RAM" if plan.host_bytes else ""
        decode = f"blended tiles, {plan.peak_bytes / GIB:.1f} GB" if plan.tiled else exact + parked
        plain = plan.bare or not here.kernels
        # A note tells that another precision runs.
        time = "" if plan.tiled or plain or note else _time(card, here, model, precision, shape)
        yield row | {"fits": not plan.tiled, "decode": decode + (" (plain torch)" if plain else ""),
                     "expected": time or "not timed", "peak_gb": plan.peak_bytes / GIB}  # fmt: skip


def _time(card: Card, here: Target, model: Model, precision: str, shape: tuple[int, ...]) -> str:
    """Return the seconds that a decode is expected to take; empty where they are not known. here: what runs it on the
    card."""
    from ...options import DEFAULTS
    from ..bench.expected import Expected, expected, in_winograd

    if card.gpu is None:
        return ""
    a = model.architecture
    form = in_winograd(DEFAULTS.decided(here), a.program("decoder", model.config), precision)
    found = expected(card.gpu, a, model.config, "decoder", precision, *shape, form)
    return f"{found.low:.3g} to {found.high:.3g} s" if isinstance(found, Expected) else ""


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines of columns; in colour those that do not fit."""
    cells = [(row["vae"], "{}x{}".format(*row["size"]), str(row["frames"]), row["decode"], row["expected"])
             for row in rows]  # fmt: skip
    widths = [max(len(row[i]) for row in (_HEADS, *cells)) + 2 for i in range(len(_HEADS))]
    yield "".join(heading(text, width) for text, width in zip(_HEADS, widths, strict=True)).rstrip()
    for row, one in zip(rows, cells, strict=True):
        line = "".join(f"{text:<{width}}" for text, width in zip(one, widths, strict=True)).rstrip()
        yield line if row["fits"] else paint(line, YELLOW, sys.stdout)
