"""`bench`: measure speed and memory of this machine, next to other implementations and to its speed limit."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import LINE, InputError, one_line
from .card import add_card, add_ratio, asked, ratio_asked
from .options import (
    add_device,
    add_force,
    add_json,
    add_norm_groups,
    add_vae,
    check_family,
    check_frames,
    check_least,
    give_json,
    size,
)

if TYPE_CHECKING:
    import torch

    from ..bench import projection
    from ..bench.measure import Bench, Case
    from ..bench.ratio import Ratio

OPERATORS = ("conv3d", "norm_act", "upsample", "to_pixels", "attention", "winograd")
PEERS = ("eager", "channels-last", "compile", "comfyui")
_TORCH_PEERS = {"eager": "torch eager", "channels-last": "torch channels-last", "compile": "torch.compile"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "bench", description="Measure this machine. `bench WHAT --help` lists the options of each.",
    )  # fmt: skip
    what = parser.add_subparsers(metavar="WHAT", required=True)
    for half, reads in (("decode", "latents"), ("encode", "clips")):
        _add_half(what, half, reads)
    kernels = what.add_parser(
        "kernels", help="time every GPU operator beside cuDNN and plain torch",
        description="Time every operator at the decoder's shapes: median ms, rate, share of the ceilings measured in "
        "the same run (matrix products of cuBLAS, a copy), and cuDNN, eager torch and comfy-kitchen beside it.",
    )
    kernels.add_argument("--only", choices=OPERATORS, action="append", help="one operator; may be repeated")
    _add_form(kernels)
    kernels.add_argument("--device", default="cuda", help="the GPU to measure (default: cuda)")
    add_json(kernels, "the rows")
    kernels.set_defaults(run=run_kernels)
    loading = what.add_parser(
        "load", help="time VAE files from disk to ready",
        description="Time how long VAE files take from disk to a VAE ready to run.",
    )  # fmt: skip
    loading.add_argument("files", nargs="+", type=Path, metavar="VAE", help=".safetensors or .gguf")
    loading.add_argument("--precisions", nargs="+", default=["auto"], metavar="P", help="as for decode (default: auto)")
    add_norm_groups(loading)
    _add_common(loading)
    loading.set_defaults(run=run_load)
    report = what.add_parser(
        "report", help="a page, or with --gpus a table, of results of the above; times projected onto other cards",
        description="Turn results of bench decode and encode into one page, and project them onto cards not measured.",
    )
    report.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="JSON of bench decode or encode")
    report.add_argument("--gpus", action="store_true", help="print a Markdown table of the GPUs that results are from")
    report.add_argument("--profile", type=Path, metavar="FILE", help="JSON of `profile`: time by stage in the page")
    add_card(report)
    _add_page(report)
    add_force(report)
    report.set_defaults(run=run_report)


def _add_half(what: argparse._SubParsersAction, half: str, reads: str) -> None:
    parser = what.add_parser(
        half, help=f"time whole {half}s, memory, share of the speed limit, dB; beside plain torch and ComfyUI's own",
        description=f"Time whole {half}s, host memory to host memory, of seeded {reads}: first call, median and "
        "spread of the next ones, memory beside what was stated, share of the speed limit measured in the same run, dB "
        "against fp32; the same for plain torch and for ComfyUI's own VAE on the same weights.",
        epilog="On a CPU the default is a small size with the demo VAE and no peers: this pack runs plain torch there.",
    )
    add_vae(parser, "random, which is seedvr2, on a GPU; demo on a CPU; a family has seeded random weights")
    parser.add_argument(
        "--size", "--sizes", dest="sizes", nargs="+", metavar="WxH",
        help="pixels (default: 1280x720 or what fits, pictures 1024x1024; CPU: 256x144)",
    )  # fmt: skip
    parser.add_argument(
        "--frames", nargs="+", type=int, metavar="N", help="1 more than a multiple of a latent's frames (default: 21 "
        "or what fits; CPU: 9), or so many pictures at once (default: 1)"
    )  # fmt: skip
    parser.add_argument("--precisions", nargs="+", default=["auto"], metavar="P", help="auto, fp32, bf16, fp16, ...")
    parser.add_argument(
        "--targets", nargs="+", type=float, default=[0.0], metavar="GB",
        help="memory targets (default: 0, 81.25 %% of the card)",
    )  # fmt: skip
    parser.add_argument("--tiling", default="auto", metavar="T", help="auto, untiled, exact or blended")
    parser.add_argument("--tile", type=int, default=0, metavar="PX", help="tile size in pixels, 0: planned")
    parser.add_argument("--overlap", type=int, metavar="PX", help="overlap of blended tiles (default: as for decode)")
    parser.add_argument(
        "--peers", nargs="*", choices=(*PEERS, "none"), metavar="NAME",
        help=f"{', '.join(PEERS)} or none (default: all on a GPU, none on a CPU)",
    )  # fmt: skip
    parser.add_argument("--comfyui", metavar="DIR", help="a ComfyUI to run beside (default: $COMFYUI_DIR)")
    parser.add_argument(
        "--comfyui-python", metavar="EXE", help="its Python (default: that of $COMFY_VENV, else this one)"
    )
    parser.add_argument(
        "--db-frames", type=int, default=9, metavar="N", help="frames compared with fp32 (default: 9; 0: no dB)"
    )
    add_norm_groups(parser)
    _add_form(parser)
    _add_common(parser)
    _add_page(parser)
    parser.set_defaults(run=run_half, half=half)


def _add_form(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--as", dest="form", choices=("sm_80", "sm_86", "sm_89", "sm_120"),
        help="run the code that GPUs of this generation run, with no more blocks on a processor than theirs hold "
        "(needs Triton; sm_120 needs an H100 or H200, too)",
    )  # fmt: skip
    add_ratio(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="calls after the first one (default: 5)")
    add_device(parser)
    add_json(parser, "everything")


def _add_page(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots, complete in one file")
    parser.add_argument("--png", type=Path, metavar="DIR", help="also write each plot as PNG into this folder; both "
                        "need matplotlib")  # fmt: skip


def run_half(args: argparse.Namespace) -> int:
    from ...loader import placement
    from ..bench.form import in_form

    _check(args, Path(args.vae or ""))
    check_family(args.vae, "random", "demo")
    device = placement("auto", args.device)
    if args.ratio is not None and set(args.peers or ()) - {"none"}:
        raise InputError(f"--ratio {args.ratio!r}: the products of peers are not slowed; leave --peers out")
    ratio = ratio_asked(args, device, args.precisions)
    with nullcontext() if ratio is not None else in_form(args.form, device):
        return _run_half(args, device, ratio)


def _run_half(args: argparse.Namespace, device: torch.device, ratio: Ratio | None) -> int:
    from ..bench import schema, table
    from ..bench.environment import environment
    from ..bench.share import with_tuning
    from ..bench.subject import DEMO, FAMILIES, RANDOM, default_weights, read_weights

    weights = args.vae or default_weights(device)
    bench, cases = _prepare(args, read_weights(weights), device)
    about = environment(device)
    print(table.environment_line(about))
    named = weights in (RANDOM, DEMO, *FAMILIES)
    settings = {
        "command": f"bench {args.half}" + (f" --as {args.form}" if args.form else "")
        + (f" --ratio {ratio.gpu.name}" if ratio else ""),
        "weights": weights if named else Path(weights).name,
        "architecture": bench.architecture.name, "widths": bench.widths, "runs": args.runs, "input": "seeded",
        "db_frames": args.db_frames, "tiling": args.tiling, "tile": args.tile, "overlap": args.overlap,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for row in _measure(bench, cases, args, device, ratio):
        for line in table.after(rows[-1] if rows else None, row):
            print(line, flush=True)
        rows.append(row)
        report = with_tuning(schema.report(args.half, about, settings, rows), device)
        if isinstance(args.json, Path):  # after every row: a run of minutes that is stopped keeps what it has
            give_json(args, report)
    if args.json == "-":
        give_json(args, report)
    if any(row.get("process_gb") is not None for row in rows):
        print(table.NOTE)
    _write_page(args, [report], None)
    return 0


def _prepare(args: argparse.Namespace, weights: Any, device: torch.device) -> tuple[Bench, list[Case]]:
    from ...loader import auto_precision
    from ...request import Request
    from ..bench.measure import Bench, Case
    from ..bench.subject import check_size

    bench = Bench(weights, device, args.runs, args.db_frames, args.norm_groups)
    gpu = device.type == "cuda"
    arch = bench.architecture
    multiple = arch.spatial * arch.side
    usual = (256, 144) if not gpu else (1024, 1024) if arch.still else (1280, 720)
    default = "x".join(str(n // multiple * multiple) for n in usual)
    sizes = [check_size("{}x{}".format(*size(text)), multiple) for text in args.sizes or [default]]
    frames = args.frames or [1 if arch.still else arch.filled(1 + (20 if gpu else 8) // arch.temporal * arch.temporal)]
    for count in frames:
        check_frames(arch, count)
    half = "decoder" if args.half == "decode" else "encoder"
    precisions = [auto_precision(device, arch) if name == "auto" else name for name in args.precisions]
    args.overlap = Request(tile=args.tile, overlap=args.overlap).overlap
    cases = [
        Case(half, precision, count, *pixels, target, args.tiling, args.tile, args.overlap)
        for pixels in sizes for count in frames for precision in precisions for target in args.targets
    ]  # fmt: skip
    for case in cases:  # before anything is measured
        Request(**case.options).check(arch.spatial)
    for case in {case.precision: case for case in cases}.values():
        bench.check(case)
    return bench, cases


def _measure(
    bench: Bench, cases: list[Case], args: argparse.Namespace, device: torch.device, ratio: Ratio | None
) -> Iterator[dict]:
    """Yield the rows as they are measured. Peers run once per size, length and precision, with the first target; none
    at the ratio of a card."""
    if ratio is not None:
        from ..bench.ratio.decode import rows

        bench.digests = True
        for case in cases:
            yield from rows(bench, case, ratio)
        return
    peers = args.peers if args.peers is not None else list(PEERS) if device.type == "cuda" else ["none"]
    folder = args.comfyui or os.environ.get("COMFYUI_DIR")
    if "comfyui" in peers and not folder:
        if args.peers:
            raise InputError("--peers comfyui: give its folder with --comfyui DIR or COMFYUI_DIR")
        print("ComfyUI is not among the peers: no --comfyui DIR and no COMFYUI_DIR")
        peers = [name for name in peers if name != "comfyui"]
    venv = os.environ.get("COMFY_VENV")
    python = args.comfyui_python or (str(Path(venv) / "bin" / "python") if venv else None)
    for case in cases:
        yield bench.ours(case)
        if case.target != args.targets[0]:
            continue
        for name in peers:
            if name in _TORCH_PEERS:
                yield bench.torch_peer(case, _TORCH_PEERS[name])
            elif name == "comfyui":
                yield from bench.comfy_peers(case, folder, python)


def run_load(args: argparse.Namespace) -> int:
    from ...loader import placement
    from ..bench import schema, table
    from ..bench.environment import environment
    from ..bench.load import line, load_rows
    from ..media.latents import check_file

    _check(args, *args.files)
    for path in args.files:
        check_file(path)
    device = placement("auto", args.device)
    about = environment(device)
    print(table.environment_line(about))
    rows = []
    for row in load_rows(args.files, args.precisions, device, args.runs, args.norm_groups):
        print(line(row), flush=True)
        rows.append(row)
    give_json(args, schema.report("load", about, {"command": "bench load", "runs": args.runs}, rows))
    return 0


def run_report(args: argparse.Namespace) -> int:
    from ..bench import projection, schema, table

    _check(args, *args.results, *([args.profile] if args.profile else []))
    cards = _cards(args)
    reports = [schema.read(path) for path in args.results]
    profile = schema.read_profile(args.profile) if args.profile else None
    if args.gpus:
        given = [f"--{name}" for name in ("html", "png", "profile") if getattr(args, name) is not None]
        if given:
            raise InputError(f"--gpus prints a table and nothing else; leave {given[0]} out")
        from ..bench.share import gpus

        print("\n".join(one_line(line, LINE) for line in gpus(reports)))
        return 0
    for path, report in zip(args.results, reports, strict=True):
        if report["kind"] == "load":
            raise InputError(f"{path}: is a result of bench load; a page is made of bench decode and encode")
        print(one_line(table.environment_line(report["environment"]), LINE))
        for line in table.lines(report["rows"]):
            print(one_line(line, LINE))
        projected = list(projection.project(report, cards))
        if projected:
            print("\nprojected, not measured (published peaks at the measured share of the speed limit):")
        for row in projected:
            print(one_line(projection.line(row), LINE))
    _write_page(args, reports, profile)
    return 0


def _cards(args: argparse.Namespace) -> Sequence[projection.Card]:
    """Return the cards to project results onto. Raises InputError where the peaks of the named card are not known."""
    from ..bench import projection

    card = asked(args)
    if card is None:
        return projection.CARDS
    found = projection.published(card.name, card.sm)
    if found is None:
        names = ", ".join(one.name for one in projection.CARDS)
        raise InputError(f"--card {args.card}: its peaks are not kept here; there are those of {names}")
    return (found,)


def _check(args: argparse.Namespace, *inputs: Path) -> None:
    """Check before any work that all files can be written and replace nothing unasked. Raises InputError."""
    from ..output.writing import check_target

    check_least(args, runs=1, db_frames=0)
    targets = [path for name in ("json", "html") if isinstance(path := getattr(args, name, None), Path)]
    for path in targets:
        check_target(path, args.force, inputs=inputs)
    if len(targets) == 2 and targets[0].absolute() == targets[1].absolute():
        raise InputError(f"{targets[1]}: is the file of --json, too; choose another name")
    folder = getattr(args, "png", None)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; --png takes a folder")
    if folder is not None or getattr(args, "html", None) is not None:
        from ..bench.plots import check_matplotlib

        check_matplotlib()


def _write_page(args: argparse.Namespace, reports: list[dict[str, Any]], profile: Any) -> None:
    from ..output.writing import write_text

    if args.html is not None or args.png is not None:
        from ..bench.page import page
        from ..bench.plots import plots, write_png

        drawn = plots(reports, profile)
        if args.html is not None:
            write_text(args.html, page(reports, drawn))
        if args.png is not None:
            args.png.mkdir(parents=True, exist_ok=True)
            for name, figure in drawn.items():
                write_png(figure, args.png / f"{name}.png")


def run_kernels(args: argparse.Namespace) -> int:
    """Measure the operators, and print and keep each row as it is measured.

    Ceilings are measured at the start and at the end: they differ if the GPU got warm or reached its power limit in
    between."""
    import torch

    from ...kernels.targets import triton_version
    from ...loader import placement
    from ..bench.form import in_form
    from ..bench.kernels import CONVS, FORM_CONVS, HEADER, Bench
    from ..bench.timing import ceilings

    device = placement("auto", args.device) if torch.cuda.is_available() else torch.device("cpu")
    if device.type != "cuda":
        raise InputError(f"--device {args.device}: bench kernels needs a CUDA GPU; on a CPU the operators run torch")
    _check(args)
    rows: list[dict[str, Any]] = []

    def say(line: str, row: dict[str, Any] | None = None) -> None:
        print(line, flush=True)
        if row is not None:
            rows.append(row)

    version = ".".join(map(str, triton_version() or ())) or "none"
    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, Triton {version}, "
        f"cuDNN {torch.backends.cudnn.version()}")  # fmt: skip
    ratio = ratio_asked(args, device, ())
    with torch.cuda.device(device):
        with in_form(args.form, device) if ratio is None else ratio.running() as here:
            for note in here.notes:
                say(note)
            if ratio is not None:
                say("only this pack's products are slowed: other rows, and the ceilings, are this GPU's own")
            elif args.form:
                say(f"code of {args.form}, with no more blocks on a processor than one with 100 KiB of shared memory "
                    "holds")  # fmt: skip
            tops = ceilings(device)
            say(f"ceilings at the start: {tops.line()}", {"ceilings": "start", **vars(tops)})
            say(HEADER)
            for row in Bench(device, FORM_CONVS if args.form or ratio else CONVS).rows(tuple(args.only or OPERATORS)):
                if isinstance(row, str):
                    say(row)
                else:
                    say(row.line(), row.record())
        tops = ceilings(device)
    say(f"ceilings at the end:   {tops.line()}", {"ceilings": "end", **vars(tops)})
    give_json(args, rows)
    return 0
