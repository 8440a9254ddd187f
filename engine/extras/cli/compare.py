"""`compare`: measure the difference of two clips, and look for visible tiles and chunks."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CheckpointError, InputError, one_line
from .options import add_json, check_json, check_least, give_json, print_facts

if TYPE_CHECKING:
    from torch import Tensor

    from ..bench.metrics import Comparison, Ratio


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "compare",
        description="Compare two clips of one size and length, frame by frame: PSNR, SSIM, the largest error, steps "
        "across tile edges and jumps between frames (of A - B, as multiples of the usual ones), colour shift.",
        epilog="Tile edges come from --tile and --overlap (this pack's tiles) or are given one by one with --rows "
        "and --columns, which works for tiles of any program.",
    )
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(), type=Path, metavar=name, help="video, folder of images, image, or `frames` in .safetensors"
        )
    parser.add_argument("--tile", type=int, default=0, metavar="PX", help="size of this pack's blended tiles")
    parser.add_argument("--overlap", type=int, metavar="PX",
                        help="what they share (default: 64, or half of a tile that is no larger)")  # fmt: skip
    parser.add_argument("--scale", type=int, default=8, metavar="PX", help="latent pixel (default: 8; others: 16, 32)")
    parser.add_argument("--rows", type=int, nargs="+", default=[], metavar="PX", help="rows at which a tile begins")
    parser.add_argument("--columns", type=int, nargs="+", default=[], metavar="PX", help="columns, likewise")
    parser.add_argument("--chunk", type=int, default=0, metavar="N", help="latents per chunk: looks at chunk starts")
    parser.add_argument("--per-latent", type=int, default=4, metavar="N", help="frames of a latent (default: 4; "
                        "Mochi: 6, LTX and Cosmos: 8)")  # fmt: skip
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ...request import usual_overlap
    from ..bench.metrics import chunk_starts, compare, tile_edges

    check_json(args, args.a, args.b)
    check_least(args, scale=1, chunk=0, per_latent=1)
    frames, rows, columns = read(args.a), args.rows, args.columns
    first = next(frames, None)
    if first is None:
        raise InputError(f"{args.a}: holds no frames")
    if args.tile:
        overlap = usual_overlap(args.tile) if args.overlap is None else args.overlap
        more = tile_edges(*first.shape[:2], args.tile, overlap, args.scale)
        rows, columns = rows + more[0], columns + more[1]

    def starts(count: int) -> list[int]:
        return chunk_starts(count, args.chunk, args.per_latent) if args.chunk else []

    result = compare(itertools.chain([first], frames), read(args.b), rows, columns, starts)
    print_facts(facts(result))
    give_json(args, {"a": str(args.a), "b": str(args.b), **result.record()})
    return 0


def read(path: Path) -> Iterator[Tensor]:
    """Yield the frames of a clip one at a time, [H, W, 3] float in 0..1."""
    from ..media import clips as media

    return _stored(path) if path.suffix.lower() == ".safetensors" else media.iter_frames(path)


def _stored(path: Path) -> Iterator[Tensor]:
    import torch

    from ...checkpoints.safetensors_file import opened, read_values
    from ...request import out_of_range
    from ...system.finite import all_finite
    from ..media.latents import check_file

    check_file(path)
    try:
        with opened(path) as (file, _, entries):
            if "frames" not in entries:
                raise InputError(f"{path}: holds no tensor `frames`; `decode` writes such files")
            entry = entries["frames"]
            shape = entry.shape
            if len(shape) != 5 or shape[0] != 1 or shape[4] != 3:
                raise InputError(f"{path}: frames are {list(shape)}; one clip [1, F, H, W, 3] is compared")
            values = math.prod(shape[2:])
            for index in range(shape[1]):
                frame = read_values(file, entry, index * values, values, path).view(shape[2:])
                frame = frame.float() / 255 if frame.dtype == torch.uint8 else frame.float()
                if not all_finite(frame):
                    raise InputError(f"{path}: frame {index} holds NaN or infinite values")
                if why := out_of_range(frame):
                    raise InputError(f"{path}: frame {index}: {why}")
                yield frame
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{one_line(path)}: ")
        raise InputError(f"{path}: is not a readable safetensors file ({reason})") from error


def facts(c: Comparison) -> Iterator[tuple[str, str]]:
    """Yield the comparison as (name, text) pairs."""

    def ratio(value: Ratio | None, where: str, absent: str) -> str:
        return absent if value is None else f"{value.ratio:.2f} times the usual, at {where} {value.at}"

    yield "clips", f"{c.frames} frames {c.width}x{c.height}"
    yield "PSNR", f"{c.psnr:.2f} dB, worst frame {c.worst_psnr:.2f} dB (frame {c.worst_frame})"
    yield "SSIM", "frames are smaller than its window of 11 pixels" if c.ssim is None else f"{c.ssim:.6f}"
    yield "largest error", f"{c.max_error:.6f} ({255 * c.max_error:.2f} of 255)"
    yield "colour shift", ", ".join(f"{255 * s:+.3f}" for s in c.shift) + " (red, green, blue; of 255)"
    yield "step at rows", ratio(c.seam_rows, "row", "no tile edges given")
    yield "step at columns", ratio(c.seam_columns, "column", "no tile edges given")
    yield "largest jump", ratio(c.jump, "frame", "one frame has none")
    yield "at chunk starts", ratio(c.chunk_jump, "frame", "no chunks given")
    seam = "" if c.seam_rows is None and c.seam_columns is None else "seam, "
    for finding in c.findings or [f"no {seam}jump or colour shift"]:
        yield "found", finding
