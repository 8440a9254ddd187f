"""Options that several commands share, with their checks and values."""

from __future__ import annotations

import argparse
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import LINE, InputError, one_line
from .parser import heading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...network.architecture import Architecture


def add_vae_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("VAE")
    add_vae(group, "small demo VAE, to try things out")
    group.add_argument("--precision", default="auto", metavar="P",
                       help="auto (see docs/precision.md), fp32, bf16, fp16; approximate: fp8, int8, "
                       "fp16_fast")  # fmt: skip
    group.add_argument("--min-db", type=float, default=0.0, metavar="DB",
                       help="least PSNR against the exact path: fp8 and int8 keep it, and auto may go down to it "
                       "(default: 0, no such floor, and auto is exact)")  # fmt: skip
    add_device(group)
    add_norm_groups(group)
    add_kernels(group)
    text = "switch an optimisation {} by its name in `info`; may be repeated"
    group.add_argument("--on", action="append", default=[], metavar="NAME", help=text.format("on"))
    group.add_argument("--off", action="append", default=[], metavar="NAME", help=text.format("off"))


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="D", help="cuda, cuda:N or cpu (default: CUDA when there is one)")


def add_kernels(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--kernels", default="auto", metavar="K",
                        help="which fused kernels run, on any card: auto (default: the prebuilt ones of this card, "
                        "Triton where those lack one; the other way round on A100 to B300), triton, plain (torch) or "
                        "the prebuilt set A (RTX 30), B (RTX 40), C or D (RTX 50); also "
                        "$ZEROWASTE_KERNELS")  # fmt: skip


def kernels(args: argparse.Namespace) -> str:
    """Return the kernels that --kernels asks for.

    Raises:
        InputError: the value is unknown.
    """
    from ...kernels.cards import checked

    return checked(args.kernels, "--kernels")


def add_norm_groups(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--norm-groups", type=int, metavar="N", help="for files of unusual widths that do not name it")


def add_vae(parser: argparse._ActionsContainer, default: str, positional: bool = False) -> None:
    """Add the VAE of a command: --vae, and as an argument where `positional`; `named_vae` reads them.

    default: the VAE that runs where none is named.
    """
    text = f"VAE: a .safetensors or .gguf file, or a family by its name, such as flux (default: {default})"
    if positional:
        parser.add_argument("file", nargs="?", metavar="VAE", help=text)
        text = "the same"
    parser.add_argument("--vae", action=_OneName, metavar="VAE", help=text)
    parser.add_argument("--weights", dest="vae", action=_OneName, metavar="VAE", help=argparse.SUPPRESS)  # its old name


class _OneName(argparse.Action):
    """Store a value; the last one counts, as of any option, but not beside one under the option's other name."""

    def __call__(self, parser: Any, args: argparse.Namespace, value: Any, option: str | None = None) -> None:
        before, by = getattr(args, self.dest), getattr(args, "_vae_by", option)
        if by != option:
            raise argparse.ArgumentError(None, f"{option} {value}: {by} {before} is named too; give one of them")
        args._vae_by = option
        setattr(args, self.dest, value)


def named_vae(args: argparse.Namespace) -> str | None:
    """Return the VAE that a command line names, by path or family; None: it names none.

    Raises:
        InputError: it names two.
    """
    given = getattr(args, "file", None)
    if given is not None and args.vae is not None:
        raise InputError(f"--vae {args.vae}: {given} is named too; give one of them")
    return args.vae if given is None else given


def family_of(text: str | None) -> Architecture | None:
    """Return the architecture of a family that a text names, where no file of this name is there; None: it names none.

    Raises:
        InputError: the text is neither a file's name nor a family's.
    """
    if text is None or Path(text).is_file():
        return None
    from ...families import ARCHITECTURES, by_words

    found = by_words(text)
    if found is None and not (Path(text).suffix or {"/", "\\"} & set(text)):
        known = ", ".join(a.name for a in ARCHITECTURES)
        raise InputError(f"--vae {text} is no file here, and no family; there are {known}")
    return found


def check_family(text: str | None, *others: str) -> None:
    """Refuse a text that is no file's name, no family's and none of `others`. Raises InputError."""
    if text not in others:
        family_of(text)


def add_output(parser: argparse._ActionsContainer, metavar: str, text: str) -> None:
    """Add the output of a command, as an argument and as -o; `settle_output` makes them one."""
    parser.add_argument("out", nargs="?", metavar=metavar, help=text)
    parser.add_argument("-o", "--out", dest="named_out", metavar=metavar, help="the same")


def settle_output(args: argparse.Namespace, metavar: str = "OUT") -> None:
    """Set `args.out` to the output that is named. Raises InputError where none is, or two."""
    if args.out is not None and args.named_out is not None:
        raise InputError(f"--out {args.named_out}: {args.out} is named too; give one of them")
    args.out = args.out if args.named_out is None else args.named_out
    if args.out is None:
        raise InputError(f"{metavar} is missing; name the output with -o {metavar}")
    if args.out == "-":
        raise InputError(f"{metavar} -: results do not go to standard output; name a file")


#: Heights that have a name, and their width.
_SIZES = {"480p": (832, 480), "720p": (1280, 720), "1080p": (1920, 1080), "1440p": (2560, 1440),
          "2160p": (3840, 2160), "4k": (3840, 2160)}  # fmt: skip


def size(text: str) -> tuple[int, int]:
    """Return width and height of a --size such as 1280x720 or 720p. Raises InputError."""
    if named := _SIZES.get(text.lower()):
        return named
    match = re.fullmatch(r"(\d{1,5}) ?[xX×*] ?(\d{1,5})", text)
    if match is None:
        raise InputError(f"--size {text}: write width x height in pixels, such as 1280x720")
    return int(match[1]), int(match[2])


#: Remedy in the refusal of a latent that another VAE has made.
CURE = "give the VAE that made it with --vae, or allow any with --any-vae"


def add_any_vae(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--any-vae", action="store_true", help="take a latent that another VAE has made")


def add_force(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--force", action="store_true", help="replace existing files")


def json_target(text: str) -> Path | str:
    """Return the value of --json: a file's path, or "-" for standard output."""
    return text if text == "-" else Path(text)


def add_json(parser: argparse._ActionsContainer, what: str = "the figures", *others: str) -> None:
    """Add --json FILE, which the command also writes `what` to, and --force. others: more names of the option."""
    parser.add_argument("--json", *others, type=json_target, metavar="FILE",
                        help=f"also write {what} to this file; - prints them and nothing else")  # fmt: skip
    add_force(parser)


def check_json(args: argparse.Namespace, *inputs: Path) -> None:
    """Check before any work that the file of --json can be written. Raises InputError."""
    from ..output.writing import check_target

    if isinstance(args.json, Path):
        check_target(args.json, args.force, inputs=inputs)


def give_json(args: argparse.Namespace, data: Any) -> None:
    """Write data where --json says, if it does."""
    from ..output.writing import write_json

    if args.json == "-":
        print(json.dumps(data, indent=1), file=args.stdout)
    elif args.json is not None:
        write_json(args.json, data)


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Refuse options that are given and below their least value. Raises InputError."""
    for name, most in least.items():
        if (value := getattr(args, name, None)) is not None and value < most:
            raise InputError(f"--{name.replace('_', '-')} {value}: give at least {most}")


def check_frames(architecture: Architecture, count: int) -> None:
    """Refuse a number of frames that no latents decode to. Raises InputError."""
    if count < 1 or architecture.filled(count) != count:
        own, nearest = architecture.counted, architecture.filled(max(count, 1))
        rule = f"{architecture.temporal}n+1" if own is None else f"{own.frames}n+{own.blended}"
        if architecture.pairs:
            rule = f"{2 * architecture.temporal}n or {2 * architecture.temporal}n+1"
        raise InputError(f"--frames {count}: give {rule} of them, such as {nearest}")


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print (name, text) pairs as a table of two columns."""
    for name, text in facts:
        print(f"{heading(name, 16)}{one_line(text, LINE)}")


def add_memory_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("memory (GB means 2^30 bytes)")
    group.add_argument("--tiling", default="auto", metavar="T",
                       help="auto (default: whole frames, blended tiles only where they do not fit), untiled, exact or "
                       "blended")  # fmt: skip
    group.add_argument("--tile", type=int, default=0, metavar="PX",
                       help="size of blended tiles, or rows of exact bands; 0: planned (default: 0)")  # fmt: skip
    group.add_argument("--overlap", type=int, metavar="PX",
                       help="overlap of blended tiles (default: 64, or half of a tile that is no larger)")  # fmt: skip
    group.add_argument("--vram-gb", type=float, metavar="GB",
                       help="memory target (default: 81.25 %% of the card, which auto tiling may raise to what is "
                       "free)")  # fmt: skip
    group.add_argument("--ram-gb", type=float, metavar="GB",
                       help="host memory for what waits there: parked histories, noise (default: half of what is "
                       "free)")  # fmt: skip
    group.add_argument("--chunk", type=int, default=0, metavar="N", help="latents per step, 0: planned (default: 0)")
    group.add_argument("--native-blend", default="assembled", metavar="B",
                       help="native tiles (MiniMax H3): assembled (default), or separate as ComfyUI did up to "
                       "0.33.0")  # fmt: skip
    group.add_argument("--native-tiles", default="family", metavar="S",
                       help="native tiles: their family's (default), or trained, which were used in training "
                       "(LynnReal)")  # fmt: skip
    return group


#: Names of the options of `add_memory_options`.
MEMORY = ("tiling", "tile", "overlap", "chunk", "vram_gb", "ram_gb", "native_blend", "native_tiles")


def memory_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `add_memory_options` as arguments of a `Request`."""
    return {name: getattr(args, name) for name in MEMORY}


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decode and encode share."""
    add_vae_options(parser)
    add_memory_options(parser)
    group = parser.add_argument_group("several GPUs (also: torchrun --nproc-per-node N -m zerowaste_vae ...)")
    group.add_argument("--devices", metavar="LIST",
                       help="GPUs that share the clip, with the bits of one: all, or a list such as cuda:0,cuda:1 "
                       "(default: one)")  # fmt: skip
    group.add_argument("--split", metavar="S",
                       help="no effect: auto, segments and rows all mean segments")  # fmt: skip
    group.add_argument("--mixed-devices", action="store_true",
                       help="allow GPUs of different kinds, whose bits differ")  # fmt: skip
    group = parser.add_argument_group("output")
    group.add_argument("--force", action="store_true", help="replace an existing output")
    group.add_argument("--json", "--report", dest="report", type=json_target, metavar="FILE",
                       help="write what the run did to this .json; - prints it and nothing else")  # fmt: skip


def rate(text: str) -> Fraction:
    """Return the frame rate of an --fps option (25, 29.97 or 30000/1001), as argparse's type of it."""
    value = frame_rate(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a frame rate; write 25, 29.97 or 30000/1001")
    return value


def frame_rate(text: str) -> Fraction | None:
    """Return the frame rate that a text holds; None where it is not a number from 0.0001 to 10000."""
    over, _, under = text.partition("/")
    try:
        # Compare floats first: some short texts make a Fraction of millions of digits.
        if 1e-4 <= float(over) / float(under or 1) <= 1e4:
            return Fraction(text).limit_denominator(100_000)
    except (ValueError, ZeroDivisionError):
        pass
    return None
