"""`bench`: what this machine reaches. `bench kernels` times every operator beside its peers and the GPU's ceilings."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    import torch

OPERATORS = ("conv3d", "norm_act", "upsample", "to_pixels", "attention")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("bench", description="Measure this machine.")
    what = parser.add_subparsers(metavar="WHAT", required=True)
    kernels = what.add_parser(
        "kernels",
        description="Time every operator at the decoder's shapes: median ms, rate, share of the ceilings measured in "
        "the same run (matrix products of cuBLAS, a copy), and cuDNN, eager torch and comfy-kitchen beside it.",
    )
    kernels.add_argument("--only", choices=OPERATORS, action="append", help="one operator; may be repeated")
    kernels.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    kernels.add_argument("--device", default="cuda", help="the GPU to measure (default: cuda)")
    kernels.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available() or torch.device(args.device).type != "cuda":
        raise InputError(f"--device {args.device}: bench kernels needs a CUDA GPU; on a CPU the operators run torch")
    device = torch.device(args.device)
    with torch.cuda.device(device):
        report = measure(device, tuple(args.only or OPERATORS))
        rows = []
        for line, row in report:
            print(line, flush=True)
            rows.extend(row)
    if args.json is not None:
        partial = args.json.with_name(args.json.name + ".part")
        partial.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        os.replace(partial, args.json)
    return 0


def measure(device: torch.device, operators: tuple[str, ...]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(line to print, rows to keep), as the measurements come. The ceilings open and close the table: a GPU that got
    warm or ran into its power limit in between shows there."""
    import torch

    from ..bench.kernels import HEADER, Bench
    from ..bench.timing import ceilings
    from ..kernels.targets import target, triton_version

    version = ".".join(map(str, triton_version() or ())) or "none"
    yield (f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, Triton {version}, "
           f"cuDNN {torch.backends.cudnn.version()}"), []
    for note in target(device).notes:
        yield note, []
    tops = ceilings(device)
    yield f"ceilings at the start: {tops.line()}", [{"ceilings": "start", **vars(tops)}]
    yield HEADER, []
    for row in Bench(device).rows(operators):
        yield row.line(), [row.record()]
    tops = ceilings(device)
    yield f"ceilings at the end:   {tops.line()}", [{"ceilings": "end", **vars(tops)}]
