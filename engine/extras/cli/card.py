"""`--card`: project what would run on a GPU that is not in this machine. No GPU is queried, nothing is measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from ...kernels.gpus import Gpu
    from ...kernels.targets import Target
    from ...network.architecture import Architecture
    from ...planning.fused_walk import FusedWalk
    from ..bench.ratio import Ratio

#: Clip whose speed limit is stated where no size is given: width, height and frames; side of pictures.
WIDTH, HEIGHT, FRAMES, SIDE = 1280, 720, 81, 1024


class Card(NamedTuple):
    """GPU, by name and compute capability (89 for 8.9), with its row of the table, or why it has none."""

    name: str
    sm: int
    gpu: Gpu | None = None
    why: str = ""


def add_card(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--card", metavar="CARD",
                        help='a GPU that is not here, such as sm_86, sm_89, sm_120 or "RTX 5070 Ti": say what would '
                        "run there and, where it is known, how long; computed, nothing is measured")  # fmt: skip


def add_ratio(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--ratio", metavar="CARD", help="on an H100 or H200: slow products to the rate that a processor of this card, "
        'such as "RTX 5070 Ti", has beside its memory and arithmetic; prebuilt kernels of its generation, or with --as '
        "Triton's. Times at the ratio of a card are not measured on it")  # fmt: skip


def ratio_asked(args: argparse.Namespace, device: torch.device, precisions: Sequence[str]) -> Ratio | None:
    """Return the ratio of --ratio, after the GPU's products were measured; None: none is asked for.

    Args:
        args: has `ratio`, and may have `form`.
        device: the GPU at hand.
        precisions: of what will run.

    Raises: InputError where that is not possible.
    """
    if args.ratio is None:
        return None
    from ..bench.ratio import ratio_of, refuse_fp8

    refuse_fp8(precisions, f"--ratio {args.ratio!r}")
    ratio = ratio_of(args.ratio, getattr(args, "form", None), device)
    print(ratio.words, flush=True)
    return ratio


def asked(args: argparse.Namespace) -> Card | None:
    """Return the GPU of `--card`; None: none is named.

    Raises:
        InputError: no known generation matches the name.
    """
    from ...kernels.gpus import find

    return None if args.card is None else Card(*find(args.card, "--card"))


def on(card: Card, architecture: Architecture, config: Any, half: str, precision: str, kernels: str = "auto") -> Target:
    """Return the target that would run a component on a card.

    Args:
        card: the GPU.
        architecture, config: of the model.
        half: "encoder" or "decoder".
        precision: one of `loader.NAMES` except "auto".
        kernels: which kernels are asked for.
    """
    from dataclasses import replace

    from ...loader import PRECISIONS
    from ...options import DEFAULTS
    from ...planning.choice import project
    from ...planning.fused_walk import FusedWalk
    from ...precision.modes import Mode

    dtype = PRECISIONS.get(precision) or PRECISIONS[architecture.activations(precision, True)]
    mode = Mode(precision if precision in ("fp8", "int8") else None, precision == "fp16_fast")
    walk = FusedWalk(architecture, config, dtype, replace(DEFAULTS, kernels=kernels))
    return project(walk, half, card.name, card.sm, mode)


def lines(card: Card, architecture: Architecture | None, config: Any, kernels: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for the lines that `info` prints about a card, and about a model's components there.

    Args:
        card: the GPU.
        architecture, config: of the model; architecture None: lines about the card alone.
        kernels: which kernels are asked for.
    """
    from ...kernels.targets import projected

    first = projected(card.name, card.sm, kernels)[0]
    yield "card", f"{card.name}, sm_{card.sm} (projected, not measured)"
    if card.gpu is not None:
        yield "card", about(card.gpu)
    elif card.why:
        yield "card", f"{card.why}: no time is computed, and plans need --vram-gb"
    yield "kernels", first.words
    if first.kernels:
        yield "shared memory", f"{first.shared_kib} KiB of a block"
        for note in first.notes:
            yield "not there", note
        yield from suggested(card.sm)
    if architecture is None:
        return
    native = architecture.native
    for half, width in (("decoder", config.decoder_widths), ("encoder", config.encoder_widths)):
        for precision in (native, "fp8", "int8") if width else ():
            yield half, f"{precision}: {words(card, architecture, config, half, precision, kernels)}"
            if time := expects(card, architecture, config, half, precision, kernels):
                yield half, f"{precision}: {time}"


def suggested(sm: int) -> Iterator[tuple[str, str]]:
    """Yield a suggestion for cards that sum products in fp16 at twice the rate, with its loss in dB; else nothing.

    Args:
        sm: the card's compute capability (89 for 8.9).
    """
    from ...kernels.targets import gains_by_half_sums

    if gains_by_half_sums(sm):
        # SeedVR2's published widths, five frames of 1280x720, the form of sm_120 on an H200.
        yield "suggestion", (
            "faster here where named, never by itself: fp16_fast (models that run in fp16; products up to twice as "
            "fast; 61.6 dB against fp32 where fp16 has 66.8, random weights), int8 (up to four times; 35.6 dB there)"
        )


def words(card: Card, architecture: Architecture, config: Any, half: str, precision: str, kernels: str,
          clip: tuple[int, int, int] | None = None) -> str:  # fmt: skip
    """Return a text: the kernels that would run a component on a card, and the speed limit if its peaks are published.

    Args:
        card, architecture, config, half, precision, kernels: as for `on`.
        clip: width, height and frames (None: the default clip).
    """
    from ...kernels.targets import projected
    from ...loader import PRECISIONS
    from ...options import DEFAULTS
    from ...planning.fusable import no_8_bit, not_fused
    from ...planning.fused_walk import FusedWalk

    program = architecture.program(half, config)
    dtype = PRECISIONS.get(precision) or PRECISIONS[architecture.activations(precision, True)]
    why = None if program.launches else not_fused([program], dtype)
    if why is None and precision not in PRECISIONS and not program.scales:
        why = no_8_bit([program], dtype)
    here = on(card, architecture, config, half, precision, kernels)
    able = projected(card.name, card.sm, kernels)
    if why is None and precision == "fp8" and able[0].kernels and not any(one.fp8 for one in able if one.kernels):
        return "not there; int8 runs instead"
    said = f"plain torch ({why})" if why else here.words
    walk = FusedWalk(architecture, config, dtype, DEFAULTS.decided(here))
    return said + _limit(card, walk, half, precision, clip)


def about(gpu: Gpu) -> str:
    """Return a GPU's figures in one line."""
    memory = " or ".join(map(str, gpu.memory))
    clock = f"{gpu.mhz} MHz listed" + (f", about {gpu.real} under load" if gpu.real != gpu.mhz else "")
    rates = "half-rate" if gpu.products["f16"] > gpu.products["f32"] else "full-rate"
    return (f"{gpu.processors} processors, {clock}, {memory} GB at {gpu.bandwidth} GB/s, {gpu.l2} MB of L2, {rates} "
            "sums in fp32")


def expects(card: Card, architecture: Architecture, config: Any, half: str, precision: str, kernels: str,
            clip: tuple[int, int, int] | None = None) -> str:  # fmt: skip
    """Return the computed time of a clip on a card, or why there is none; empty for a GPU without a row in the table,
    and where plain torch runs.

    Arguments as of `words`."""
    from ...options import DEFAULTS
    from ..bench.expected import Expected, expected, in_winograd

    if card.gpu is None or not (here := on(card, architecture, config, half, precision, kernels)).kernels:
        return ""
    form = in_winograd(DEFAULTS.decided(here), architecture.program(half, config), precision)
    width, height, frames = clip or _usual(architecture)
    latents, s = architecture.latents(architecture.filled(frames)), architecture.spatial
    found = expected(card.gpu, architecture, config, half, precision, latents, height // s, width // s, form)
    return f"{found.text} for {width}x{height}x{frames}" if isinstance(found, Expected) else found


def _usual(architecture: Architecture) -> tuple[int, int, int]:
    """Return width, height and frames of the clip that is spoken of where no size is given."""
    return (SIDE, SIDE, 1) if architecture.still else (WIDTH, HEIGHT, FRAMES)


def _limit(card: Card, walk: FusedWalk, half: str, precision: str, clip: tuple[int, int, int] | None) -> str:
    """Return a text with the speed limit by published peaks, of the form that layers have; empty where there are
    none."""
    from ..bench import projection, speed_limit

    published = projection.published(card.name, card.sm)
    if published is None or precision not in published.peaks:
        return ""
    architecture = walk.architecture
    width, height, frames = clip or _usual(architecture)
    size = [n // architecture.spatial for n in (height, width)]
    work = speed_limit.work(architecture, walk.config, half, architecture.latents(architecture.filled(frames)), *size)
    if precision in ("fp16", "bf16"):
        work = speed_limit.in_form(work, walk, half, *size)
    least = speed_limit.seconds(work, precision, published.peaks[precision], published.bandwidth)
    return f"; at least {1e3 * least / frames:.1f} ms a frame at {width}x{height} ({published.name}'s published peaks)"
