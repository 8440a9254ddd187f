"""Time two checkouts of this pack in one process, call by call in turns, to see if a change costs speed.

    PYTHONPATH=FOLDER python tools/compare_speed.py OTHER [--runs 9] [--json FILE]

FOLDER holds one checkout as zerowaste_vae, OTHER is the folder of the other one. On a GPU it runs decodes and encodes
of the published widths with seeded weights, each after the kernels of both have been compiled in parallel processes.
Two processes one after the other differ by 1.5 % with the same code (H200); calls in turns see the same clocks. The
times of first calls, with planning and compiling, are those of the processes that compile in parallel. --small: the
demo VAE on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import frame_digests
import torch
from zerowaste_vae.engine.extras.bench.calls import Spread, in_turns

#: Family, precision, half, [T, h, w] in latents.
CASES = (
    ("seedvr2", "fp16", "decode", (6, 90, 160)),
    ("seedvr2", "fp16", "encode", (6, 90, 160)),
    ("seedvr2", "fp8", "decode", (6, 90, 160)),
    ("wan2.1", "bf16", "decode", (9, 90, 160)),
    ("flux", "bf16", "decode", (1, 128, 128)),
)
SMALL = (("demo", "fp32", "decode", (2, 3, 5)), ("demo", "fp32", "encode", (2, 3, 5)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time two checkouts in turns.")
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--runs", type=int, default=9, help="calls of each (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there")
    parser.add_argument("--small", action="store_true", help="the demo VAE on a CPU")
    parser.add_argument("--warm", nargs=3, metavar=("CASE", "WHO", "WEIGHTS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not (args.other / "__init__.py").is_file():
        parser.error(f"{args.other}: no checkout of this pack")
    if not args.small and not torch.cuda.is_available():
        parser.error("no CUDA GPU: --small runs on a CPU")
    packs = {"this": importlib.import_module("zerowaste_vae"), "other": other_pack(args.other)}
    cases = SMALL if args.small else CASES
    if args.warm:
        case, who, weights = args.warm
        print(turns(cases[int(case)], packs, Path(weights), 0, args.small, [who])[who][0])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ZEROWASTE_CACHE"] = str(Path(folder) / "cache")
        families = [] if args.small else dict.fromkeys(family for family, *_ in cases)
        files = {family: frame_digests.seeded_file(family, Path(folder)) for family in families}
        found, first = {}, {}
        if not args.small:
            calls = [(str(i), who, str(files[case[0]])) for i, case in enumerate(cases) for who in packs]
            first = {(i, who): s for (i, who, _), s in zip(calls, warm(args.other, calls), strict=True)}
        for i, case in enumerate(cases):
            times = turns(case, packs, files.get(case[0]), args.runs, args.small)
            name = " ".join((*case[:3], "x".join(map(str, case[3]))))
            found[name] = {who: vars(Spread.of(ms[1:])) for who, ms in times.items()}
            for who in packs if first else ():
                found[name][who]["first"] = first[str(i), who]
            print(line(name, found[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def line(name: str, found: dict[str, dict[str, float]]) -> str:
    each = (f"{who} {t['median']:.2f} ({t['low']:.2f} to {t['high']:.2f})" for who, t in found.items())
    more = found["this"]["median"] / found["other"]["median"] - 1
    first = [f"{who} {t['first']:.0f}" for who, t in found.items() if "first" in t]
    behind = f"; the first call {', '.join(first)}" if first else ""
    return f"{name}: {', '.join(each)} ms/frame, {100 * more:+.1f} %{behind}"


def other_pack(folder: Path) -> ModuleType:
    """Import the other checkout under another name: its imports are relative."""
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location("other_vae", init, submodule_search_locations=[str(folder)])
    module = sys.modules["other_vae"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def warm(other: Path, calls: list[tuple[str, str, str]]) -> list[float]:
    """Compile the kernels of each call, in parallel processes; return milliseconds per frame of these first calls."""

    def run(call: tuple[str, str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(Path(__file__).resolve()), str(other), "--warm", *call]
        return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)

    spent = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done in pool.map(run, calls):
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            spent.append(float(done.stdout.split()[-1]))
    return spent


def turns(
    case: tuple[str, str, str, tuple[int, int, int]], packs: dict[str, ModuleType], file: Path | None, runs: int,
    small: bool, called: Sequence[str] = ("this", "other"),
) -> dict[str, list[float]]:  # fmt: skip
    """Return milliseconds per frame of each pack's calls: the first one and `runs` more."""
    _, precision, half, size = case
    vaes: dict[str, Any] = {}
    for who, pack in packs.items():
        vaes[who] = pack.load(file or pack.demo_vae_path(), precision, "cpu" if small else "cuda")
    vae = vaes["this"]  # the other one may be so old that it does not give its sizes
    frames = vae.architecture.frames(size[0])
    make = frame_digests.latent if half == "decode" else frame_digests.video
    source = make(vae, size) if half == "decode" else make(vae, size).float() / 255
    calls = {who: functools.partial(getattr(vaes[who], half), source) for who in called}
    seconds = in_turns(calls, runs, vae.device)[0]
    for each in vaes.values():
        each.release()
    vaes.clear()
    del vae, each, calls
    gc.collect()
    if not small:
        torch.cuda.empty_cache()
    return {who: [1e3 * s / frames for s in each] for who, each in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
