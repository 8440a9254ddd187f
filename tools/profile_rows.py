"""What ranks wait for that make rows of the same frames: one profiled decode, by what each GPU did in its time.

    torchrun --standalone --nproc-per-node 2 tools/profile_rows.py --frames 21 81

Run where the pack is importable as zerowaste_vae. Weights are seeded ones of a family's published widths, frames go to
host memory. Each case prints a line for every rank: the call, kernels, the time of the stream that they are on between
them (its next launch came late; what others tell it was not there yet; the rest), and the exchanges themselves, with
what they take where they are quickest and how long they wait beyond that for another rank. Profiling slows the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from zerowaste_vae import load
from zerowaste_vae.engine.archs import by_name
from zerowaste_vae.engine.bench.subject import check_size, noise_latent, random_checkpoint
from zerowaste_vae.engine.devices.ranks import Ranks, joined, under_torchrun
from zerowaste_vae.engine.errors import InputError, ZeroWasteError

ON_GPU, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
Span = tuple[float, float]


class Account(NamedTuple):
    """Of one rank's GPU, in microseconds. exchanges: of each, in their order."""

    work: float
    launch: float
    others: float
    rest: float
    kernels: int
    exchanges: tuple[float, ...]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--weights", default="seedvr2", metavar="FAMILY")
    parser.add_argument("--size", default="1280x720", metavar="WxH")
    parser.add_argument("--frames", nargs="+", type=int, default=[21], metavar="N")
    parser.add_argument("--precision", default="auto", metavar="P")
    asked = parser.parse_args(argv)
    if not under_torchrun() or not torch.cuda.is_available():
        raise InputError("rows are profiled on CUDA GPUs: torchrun --nproc-per-node 2 tools/profile_rows.py")
    with joined() as ranks:
        profile(asked, replace(ranks, split="rows"))
    return 0


def profile(asked: argparse.Namespace, ranks: Ranks) -> None:
    architecture = by_name(asked.weights)
    vae = load(random_checkpoint(architecture=architecture), device=ranks.device, precision=asked.precision)
    width, height = (n // architecture.spatial for n in check_size(asked.size, architecture.spatial))
    for frames in asked.frames:
        z = noise_latent(vae.latent_channels, (frames - 1) // architecture.temporal + 1, height, width)
        for _ in range(2):
            vae.decode(z, output="uint8", devices=ranks)
        ranks.gather(None)
        began = time.perf_counter()
        vae.decode(z, output="uint8", devices=ranks)
        ranks.gather(None)
        plain = time.perf_counter() - began
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
            began = time.perf_counter()
            vae.decode(z, output="uint8", devices=ranks)
            ranks.gather(None)
            took = time.perf_counter() - began
        every = ranks.gather((account(events_of(traced)), took))
        if ranks.rank == 0:
            print(f"{asked.weights} {vae.precision} {asked.size} x {frames}, {1e3 * plain:.0f} ms a call unprofiled")
            for rank, line in enumerate(lines([a for a, _ in every], [t for _, t in every])):
                print(f"  rank {rank}: {line}", flush=True)


def events_of(traced: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8"))["traceEvents"]


def account(events: Iterable[Mapping[str, Any]]) -> Account:
    """Of a trace in Chrome's form: what the stream with most work did, and between what."""
    events = [e for e in events if e.get("ph") == "X"]
    called = {e["args"]["correlation"]: e["ts"] + e["dur"] for e in events
              if e.get("cat") in CALLS and "correlation" in e.get("args", {})}  # fmt: skip
    on_gpu = sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda e: e["ts"])
    told = [e for e in on_gpu if "nccl" in e["name"].lower()]
    own = [e for e in on_gpu if "nccl" not in e["name"].lower()]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in told]
    busiest: Counter[Any] = Counter()
    for e in own:
        busiest[e["args"]["stream"]] += e["dur"]
    (stream, _), *_ = busiest.most_common(1) or [(None, 0)]
    work = launch = others = rest = 0.0
    kernels, end = 0, None
    for e in own:
        if e["args"]["stream"] != stream:
            continue
        begins = e["ts"]
        if end is not None and begins > end:
            late = min(max(called.get(e["args"].get("correlation"), end), end), begins)
            waited = overlap(spans, (late, begins))
            launch, others, rest = launch + late - end, others + waited, rest + begins - late - waited
        work, kernels = work + e["dur"], kernels + (e["cat"] == "kernel")
        end = max(end or 0.0, begins + e["dur"])
    return Account(work, launch, others, rest, kernels, tuple(e["dur"] for e in told))


def overlap(spans: Sequence[Span], within: Span) -> float:
    """How much of `within` is in spans, which follow each other."""
    first, last = within
    total = 0.0
    for a, b in spans[max(bisect_left(spans, (first, first)) - 1, 0) :]:
        if a >= last:
            break
        total += max(min(b, last) - max(a, first), 0.0)
    return total


def lines(accounts: Sequence[Account], calls: Sequence[float]) -> list[str]:
    """One for each rank; calls: in seconds."""
    alike = len({len(a.exchanges) for a in accounts}) == 1
    least = [min(each) for each in zip(*(a.exchanges for a in accounts), strict=True)] if alike else []
    made = []
    for a, took in zip(accounts, calls, strict=True):
        total = sum(a.exchanges)
        split = f", {total / 1e3:.1f} ms"
        if alike:
            split = f": {sum(least) / 1e3:.1f} ms at their quickest, {(total - sum(least)) / 1e3:.1f} for another rank"
        made.append(
            f"call {1e3 * took:.0f} ms; {a.kernels} kernels {a.work / 1e3:.1f} ms; between them {a.launch / 1e3:.1f} "
            f"ms for launches, {a.others / 1e3:.1f} for exchanges, {a.rest / 1e3:.1f} else; {len(a.exchanges)} "
            f"exchanges{split}"
        )
    return made


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ZeroWasteError as error:
        sys.exit(f"error: {error}")
