"""`info`: describe this machine and a VAE file."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...system.hardware import Hardware, survey
from ...system.memory import GIB
from .card import Card, add_card, asked, lines, suggested, words
from .options import (
    add_json,
    add_kernels,
    add_norm_groups,
    add_vae,
    check_json,
    family_of,
    give_json,
    kernels,
    named_vae,
    print_facts,
)

if TYPE_CHECKING:
    from ...network.architecture import Architecture
    from ...vae import VideoVAE

Lines = Iterable[tuple[str, str]]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "info",
        description="Show hardware, versions and which fast paths are on; with a VAE file or a family, also what it "
        "holds and what runs its halves, here or on another card.",
    )
    add_vae(parser, "none: the machine alone", positional=True)
    add_card(parser)
    add_kernels(parser)
    add_norm_groups(parser)
    add_json(parser, "the lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json(args)
    facts = about(named_vae(args), args.norm_groups, asked(args), kernels(args))
    print_facts(facts)
    give_json(args, [{"name": name, "text": text} for name, text in facts])
    return 0


def about(
    vae: str | None, norm_groups: int | None = None, card: Card | None = None, chosen: str = "auto"
) -> list[tuple[str, str]]:
    """Return all lines (name, text).

    Args:
        vae: VAE file or family, or None.
        norm_groups: for a file that does not name them.
        card: GPU to describe in place of this machine.
        chosen: which kernels are asked for.
    Raises:
        InputError: `vae` is no file and no family, or norm_groups is of no use.
    """
    # Read the file first: if it cannot be used, only the error is printed.
    architecture, config, said = None, None, ()
    family = family_of(vae)
    if norm_groups is not None and (vae is None or family is not None):
        raise InputError(f"--norm-groups {norm_groups} is for a VAE file; name one, or leave it out")
    if family is not None:
        architecture, config, said = published(family)
    elif vae is not None:
        architecture, config, said = described(Path(vae), norm_groups)
    if card is not None:
        return [*lines(card, architecture, config, chosen), *said]
    runs = describe_kernels(architecture, config, chosen) if architecture else ()
    return [*describe_hardware(survey(chosen)), *said, *runs]


def published(found: Architecture) -> tuple[Architecture, Any, list[tuple[str, str]]]:
    """Return a family, its published configuration, and lines (name, text) about it."""
    config = found.published.config
    about = [("architecture", f"{found.name}, {found.published.title}, published sizes"),
             *((half, _half(bool(widths), widths, (), half)) for half, widths in _halves(config))]  # fmt: skip
    return found, config, about


def _halves(config: Any) -> Iterable[tuple[str, tuple[int, ...] | None]]:
    return ("encoder", config.encoder_widths), ("decoder", config.decoder_widths)


def describe_kernels(architecture: Architecture, config: Any, chosen: str) -> Lines:
    """Yield lines about the kernels that run each component on the default GPU; none without a GPU.

    Args:
        architecture, config: of the model.
        chosen: which kernels are asked for.
    """
    import torch

    if not torch.cuda.is_available():
        return
    from ...kernels.targets import target

    device = torch.device("cuda")
    card = Card(torch.cuda.get_device_name(device), target(device, chosen).capability)
    for half, widths in _halves(config):
        if widths:
            said = words(card, architecture, config, half, architecture.native, chosen)
            yield f"{half} runs", f"{architecture.native}: {said}"


def describe_hardware(hardware: Hardware) -> Lines:
    """Yield lines about the machine, its software and the optimisations."""
    from .... import __version__

    yield "zerowaste-vae", __version__
    yield "system", f"{hardware.system}, Python {hardware.python}, {hardware.cores} CPU cores"
    yield "free RAM", _gb(hardware.ram_free)
    yield "torch", hardware.torch or "not installed"
    if hardware.cure:
        yield "cure", hardware.cure
    yield "CUDA", f"{hardware.cuda or 'none'}, cuDNN {hardware.cudnn or 'none'}"
    for name, number in hardware.packages.items():
        yield name, number or "not installed"
    for gpu in hardware.gpus:
        yield f"GPU {gpu.index}", f"{gpu.name}, sm_{gpu.sm}, {_gb(gpu.total)}, {_gb(gpu.free)} free"
        yield from suggested(gpu.sm) if gpu.runnable else ()
    for path in hardware.fast_paths:
        yield path.name, f"{'on' if path.on else 'off'}: {path.reason}"
    if hardware.torch is not None:
        yield from describe_schedules(hardware)
        yield from describe_options(any(gpu.runnable for gpu in hardware.gpus))


def describe_schedules(hardware: Hardware) -> Lines:
    """Yield lines about the origin of each GPU's schedules."""
    if not any(gpu.runnable for gpu in hardware.gpus):
        return
    import torch

    from ..tuning import kept

    for gpu in hardware.gpus:
        device = torch.device("cuda", gpu.index)
        if gpu.runnable and (words := kept.words(device)):
            found = kept.of(device)
            yield f"schedules {gpu.index}", words + ("" if found else "; `zerowaste-vae tune` measures on this GPU")
            for layer, schedule, why in found.dropped if found else ():
                yield "not right here", f"{layer}: {schedule}: {why}"


def describe_options(gpu: bool) -> Lines:
    """Yield a line for each optimisation on the default device, for the first family's VAE in its default precision.

    gpu: the default device is a GPU."""
    import torch

    from ...families import DEFAULT
    from ...kernels.targets import target
    from ...loader import PRECISIONS, auto_precision
    from ...options import BY_DEFAULT, DEFAULTS, TOGGLES, unused
    from ...planning.fusable import availability

    device = torch.device("cuda" if gpu else "cpu")
    dtype = PRECISIONS[auto_precision(device, DEFAULT)]
    reasons = availability(device, DEFAULT.name, None, dtype)
    winograd = DEFAULTS.decided(target(device)).winograd
    off = unused(DEFAULTS, reasons, dtype, reasons["triton_fusion"] is None, winograd)
    for name in TOGGLES:
        why = f"not here: {reasons[name]}" if reasons[name] else f"off: {off[name]}" if name in off else "on"
        yield "optimisation", f"{name} {why.replace(BY_DEFAULT, 'unless asked for')}"


def described(path: Path, norm_groups: int | None) -> tuple[Architecture, Any, Lines]:
    """Return a file's family, its configuration, and lines (name, text) about it.

    They describe the result of `load`, or the encoder where the file holds no decoder.

    Raises:
        CheckpointError: as `load` does.
    """
    from ...checkpoints import read_checkpoint
    from ...loader import encoder_only, load

    checkpoint = read_checkpoint(path)
    types = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in checkpoint.tensors.values())
    parameters = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    names, stored = list(checkpoint.tensors), checkpoint.metadata.get("norm_num_groups")
    half, vae = encoder_only(checkpoint, norm_groups), None
    if half is None:
        vae = load(checkpoint, precision="fp32", device="cpu", norm_groups=norm_groups)
        half = vae.architecture, vae.model.config
    architecture, config = half

    def about() -> Lines:
        yield "file", f"{path} ({path.stat().st_size / (1 << 20):.1f} MiB)"
        spatial = architecture.spatial * architecture.side
        time = "of one picture" if architecture.still else f"and {architecture.temporal} frames"
        time = "of one frame of the clip" if architecture.joined else time
        yield "architecture", f"{architecture.name}, {spatial}x{spatial} pixels {time} per latent"
        if variant := architecture.variant(config):
            yield "variant", variant
        if architecture.in_tiles:
            own = architecture.sections
            yield "tiles", f"its own, of {own.size} pixels in sections of {own.frames} frames: part of the model"
            yield from describe_training(architecture, config)
        scale = "the network's own" if architecture.scale == 1.0 else f"the network's times {architecture.scale}"
        yield "latents", f"{config.latent_channels * architecture.side**2} channels, {scale}"
        yield "encoder", _half(vae is None or vae.can_encode, config.encoder_widths, names, "encoder")
        if pruned := getattr(config, "pruned", ()):
            yield "pruned", f"{len(pruned)} residual blocks have kept their shortcuts only: {', '.join(pruned)}"
        yield "decoder", _half(vae is not None, config.decoder_widths, names, "decoder")
        if config.norm_groups is not None:
            source = "named in the file" if stored is not None else "the usual number"
            yield "norm groups", f"{config.norm_groups} ({'--norm-groups' if norm_groups else source})"
        if vae is not None:
            yield from describe_calibration(vae)
        listed = ", ".join(f"{number} {name}" for name, number in types.most_common())
        yield "weights", f"{parameters / 1e6:.1f} M in {len(names)} tensors, read as {listed}"
        if vae is None:
            yield "half a VAE", "without its decoder it is not run: use the file that holds both"
        elif not vae.can_encode:
            yield "half a VAE", "it decodes; to encode takes the file that holds both"

    return architecture, config, about()


def describe_training(architecture: Architecture, config: Any) -> Lines:
    """Yield a line about other tiles that a decoder was trained in."""
    program = architecture.program("decoder", config)
    if program is not None and program.trained is not None:
        (short, _), (long, _), _ = program.trained.sides
        yield "trained in", (f"tiles of {short} pixels of a frame's shorter side and {long} of its longer one, which "
                             "--native-tiles trained uses")  # fmt: skip


def describe_calibration(vae: VideoVAE) -> Lines:
    """Yield lines about measurements of the file by `calibrate` or by its first 8-bit runs."""
    from ...planning.fusable import why_no_8_bit
    from ...precision.modes import PRECISIONS
    from .calibrate import describe

    a = vae.architecture
    if why := why_no_8_bit(a.programs(vae.model.config), PRECISIONS[a.native], None):
        yield "calibration", f"none: there is no 8 bit for it ({why})"
        return
    there = [(half, getattr(vae.model, half)) for half in ("encoder", "decoder")]
    scales = any(made is not None and made.program.scales for _, made in there)
    if scales:
        yield "calibration", "8-bit products of its decoder scale each row as it comes"
    halves = [half for half, made in there
              if made is not None and not (made.program.scales or made.program.why_not_fused())]  # fmt: skip
    tables = [(half, vae.store.table(half)) for half in halves]
    for half, table in tables:
        for line in describe(half, table) if table else ():
            yield "calibration", line
    if halves and not any(table for _, table in tables):
        more = "" if scales else " (see the command `calibrate`)"
        yield "calibration", f"none of {' and '.join(halves)}; fp8 and int8 measure the first clips they see{more}"


def _half(complete: bool, widths: tuple[int, ...] | None, names: Iterable[str], half: str) -> str:
    if complete and widths:
        return f"widths {', '.join(map(str, widths))}"
    return "incomplete" if any(name.startswith(f"{half}.") for name in names) else "not in this file"


def _gb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.1f} GB"
