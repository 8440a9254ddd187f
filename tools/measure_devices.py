"""Measure the gain of several GPUs: the same decodes by one and by several in turns, with medians, memory and equal
bits, next to the gain that the time model computes.

    python tools/measure_devices.py --frames 81 161 597
    torchrun --standalone --nproc-per-node 2 tools/measure_devices.py --frames 161

Clips are shared by segments: in one process among 2, 4, 8, ... of the GPUs there are, one count after the other; under
torchrun among all ranks. Run it where the pack is importable as zerowaste_vae. Each count prints one line and is
appended to a file, with --json, once its clip is done. Weights are seeded ones of a family's published widths, frames
go to host memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zerowaste_vae import VideoVAE, load
from zerowaste_vae.engine.archs import by_name
from zerowaste_vae.engine.bench.calls import Spread
from zerowaste_vae.engine.bench.subject import check_size, copy_of, random_checkpoint, seeded_input
from zerowaste_vae.engine.distributed.ranks import Ranks, joined, under_torchrun
from zerowaste_vae.engine.distributed.shares import duration, leads_of, split
from zerowaste_vae.engine.errors import ZeroWasteError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--weights", default="seedvr2", metavar="FAMILY")
    parser.add_argument("--sizes", nargs="+", default=["1280x720"], metavar="WxH")
    parser.add_argument("--frames", nargs="+", type=int, default=[161], metavar="N")
    parser.add_argument("--precisions", nargs="+", default=["auto"], metavar="P")
    parser.add_argument("--counts", nargs="+", type=int, metavar="N", help="of devices in one process (default: 2, 4, "
                        "8 of those there are)")  # fmt: skip
    parser.add_argument("--runs", type=int, default=3, help="turns of each")
    parser.add_argument("--calls", type=int, default=1, help="timed calls in a turn, behind one that is not")
    parser.add_argument("--output", default="uint8", help="type of the frames: uint8, float16 or float32")
    parser.add_argument("--cpu", action="store_true", help="also where there are GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(argv)
    equal = True
    with joined() if under_torchrun() else nullcontext() as ranks:
        for case in cases(asked, ranks):
            if ranks is None or ranks.rank == 0:
                tell(case, asked.json)
                equal &= case["equal"]
    return 0 if equal else 1


def cases(asked: argparse.Namespace, ranks: Ranks | None) -> Iterator[dict[str, Any]]:
    architecture = by_name(asked.weights)
    weights = random_checkpoint(architecture=architecture)
    gpus = 0 if asked.cpu else torch.cuda.device_count()
    device = (ranks.device if ranks else "cuda:0") if gpus else "cpu"
    ways: dict[int, Ranks | list[str]]
    if ranks:
        ways = {ranks.count: ranks}
    else:
        counts = asked.counts or [n for n in (2, 4, 8) if n <= max(gpus, 2)]
        ways = {n: [f"cuda:{i}" if gpus else "cpu" for i in range(n)] for n in counts}
    for precision in asked.precisions:
        vae = load(copy_of(weights), device=device, precision=precision)
        for size, frames in product(asked.sizes, asked.frames):
            z = seeded_input(vae, "decoder", frames, *check_size(size, architecture.spatial))
            latents, height, width = z.shape[2:]
            found = measured(vae, z, ways, ranks, asked)
            for way in ways:
                yield {
                    "weights": asked.weights, "size": size, "frames": architecture.frames(latents), "split": "segments",
                    "precision": vae.precision, "devices": way,
                    "computed": computed(vae, latents, height, width, way), **found[way],
                }  # fmt: skip
        vae.release()


def computed(vae: VideoVAE, latents: int, height: int, width: int, count: int) -> float:
    """Return the speedup over one device by the number of the steps' operations."""
    leads, rates = leads_of(vae.model.decoder.program, height, width, latents), [1.0] * count
    return (latents + leads(0)) / duration(split(leads, latents, rates), rates)


def measured(
    vae: VideoVAE, z: Tensor, ways: dict[int, Ranks | list[str]], ranks: Ranks | None, asked: argparse.Namespace
) -> dict[int, dict[str, Any]]:
    """Time calls in turns: each count of devices, and one device alone (0), which other ranks wait for. The first turn
    begins with a call that is not timed."""
    alone = 0
    seconds: dict[int, list[float]] = {way: [] for way in (alone, *ways)}
    reserved: dict[int, list[float | None]] = {}
    stated, frames = {}, {}

    def call(way: int) -> Tensor | None:
        if way != alone:
            return vae.decode(z, output=asked.output, devices=ways[way])
        return vae.decode(z, output=asked.output) if ranks is None or ranks.rank == 0 else None

    for turn, way in product(range(asked.runs), (alone, *ways)):
        for timed_one in (*(False,) * (not turn), *(True,) * asked.calls):
            with timed(seconds[way] if timed_one else [], ranks):
                made = call(way)
            if made is not None:
                frames[way] = made
        report = vae.last_report
        own = report.reserved_gb if report is not None else None
        reserved[way] = ranks.gather(own) if ranks else [own]
        stated[way] = None if report is None else report.predicted_gb
    count = vae.architecture.frames(z.shape[2])
    each = {way: Spread.of(times, 1e3 / count) for way, times in seconds.items()}

    def both(of: dict[int, Any], way: int) -> dict[str, Any]:
        return {"one": of[alone], "several": of[way]}

    medians, spreads = {way: t.median for way, t in each.items()}, {way: [t.low, t.high] for way, t in each.items()}
    return {way: {"ms_a_frame": both(medians, way), "spread": both(spreads, way),
                  "speedup": medians[alone] / medians[way],
                  "equal": torch.equal(frames[alone], frames[way]) if alone in frames else None,
                  "stated_gb": both(stated, way), "reserved_gb": both(reserved, way)} for way in ways}  # fmt: skip


@contextmanager
def timed(seconds: list[float], ranks: Ranks | None) -> Iterator[None]:
    """Time a block that all ranks begin and end together."""
    if ranks:
        ranks.gather(None)
    began = time.perf_counter()
    yield
    if ranks:
        ranks.gather(None)
    seconds.append(time.perf_counter() - began)


def tell(case: dict[str, Any], file: Path | None) -> None:
    one, several = case["ms_a_frame"]["one"], case["ms_a_frame"]["several"]
    print(f"{case['weights']} {case['precision']} {case['size']} x {case['frames']}: {case['devices']} devices by "
          f"segments {several:.2f} ms a frame {spread(case, 'several')}, one {one:.2f} {spread(case, 'one')}: "
          f"{case['speedup']:.3f} times, computed {case['computed']:.2f}; stated GB {case['stated_gb']}, reserved "
          f"{case['reserved_gb']}; bits {'equal' if case['equal'] else 'DIFFER'}", flush=True)  # fmt: skip
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(case) + "\n")


def spread(case: dict[str, Any], who: str) -> str:
    low, high = case["spread"][who]
    return f"({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ZeroWasteError as error:
        sys.exit(f"error: {error}")
