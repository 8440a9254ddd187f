"""Time decodes of all families at the ratio of a consumer card, on an H100 or H200.

    PYTHONPATH=FOLDER python tools/measure_ratio.py assemble [--card CARD] [--cases NAMES] --folder DIR
    PYTHONPATH=FOLDER python tools/measure_ratio.py measure  [--card CARD] [--cases NAMES] --folder DIR --out FILE.json
    PYTHONPATH=FOLDER python tools/measure_ratio.py page FILES.json

FOLDER holds this checkout as zerowaste_vae. `assemble` needs no GPU: it assembles every kernel of the cases with its
products as they are and repeated, counts them, and keeps the code in DIR; give that folder to `measure`, which then
only measures. `measure` calibrates the GPU, times one kernel at several k (the knee), then each case with products as
they are and at the ratio, and compares the frames; it writes FILE.json after every case and stops after --seconds.
`page` writes the tables of docs/ratio.md and the data that `plan --card` computes with (engine/planning/ratio.json)
from such files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from zerowaste_vae.engine.archs import by_name
from zerowaste_vae.engine.bench.calls import Spread
from zerowaste_vae.engine.bench.profile import profile
from zerowaste_vae.engine.bench.ratio import PLAIN, Ratio, ratio_of
from zerowaste_vae.engine.bench.ratio.foreign import refuse_foreign
from zerowaste_vae.engine.bench.ratio.run import prebuilt_form
from zerowaste_vae.engine.bench.ratio.traffic import counting
from zerowaste_vae.engine.bench.ratio.unit import factors, text
from zerowaste_vae.engine.bench.speed_limit import work
from zerowaste_vae.engine.bench.subject import copy_of, random_checkpoint, seeded_input
from zerowaste_vae.engine.bench.timing import measure as timed
from zerowaste_vae.engine.kernels.conv3d import Epilogue, conv3d, pack_weight
from zerowaste_vae.engine.kernels.gpus import RATES, find
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.prebuilt.keys import Key
from zerowaste_vae.engine.kernels.prebuilt.library import library
from zerowaste_vae.engine.kernels.targets import prebuilt
from zerowaste_vae.engine.loader import PRECISIONS
from zerowaste_vae.engine.options import DEFAULTS, Options
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.planning.launches import META, keys_of, needs, uniform
from zerowaste_vae.engine.planning.launches import _walk as dry_run
from zerowaste_vae.engine.tuning.kept import nvidia_smi

ROOT = Path(__file__).resolve().parent.parent
CARD = "RTX 5070 Ti"
#: Timed calls of a case in each form, after a first one; one more of the second form is profiled.
RUNS = 2
#: k of sums in fp32 at which one kernel is timed, as shares of the card's.
KNEE = (1.0, 2.0, 3.5)


class Case(NamedTuple):
    """A decode. frames, width, height: of the clip. on: ("winograd",) in that form; () direct."""

    family: str
    precision: str
    frames: int
    width: int
    height: int
    on: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join((self.family, self.precision, *self.on))

    @property
    def options(self) -> Options:
        return replace(DEFAULTS, winograd=bool(self.on))

    def texts(self, form: str) -> Iterator[tuple[str, str]]:
        """Yield symbol and PTX of every kernel of a prebuilt form that this decode launches."""
        a, fast = by_name(self.family), self.precision == "fp16_fast"
        kind = self.precision if self.precision == "int8" else None
        dtype = PRECISIONS.get(self.precision) or PRECISIONS[a.activations(self.precision, True)]
        options, config, here = self.options, a.published.config, prebuilt("", 90, form)
        walk = FusedWalk(a, config, dtype, options)
        if "decoder" in walk.halves:
            # Kernels depend on a plane's area, not on its sides: a square of this one's launches the same.
            side = math.isqrt(self.height * self.width // (a.spatial * a.side) ** 2)
            found: set[Key] = set()
            for operands in {kind, None}:
                with recording(here) as calls, torch.inference_mode(False), torch.no_grad():
                    walk.use("decoder", uniform(a.program("decoder", config), operands, fast))
                    dry_run(walk, "decoder", side)
                found |= keys_of(calls)
        else:
            found = set(needs(a, config, "decoder", dtype, options, here=here, kind=kind, half_accumulate=fast))
        keys = sorted((key for key in found if library().has(form, key)), key=lambda key: key.digest)
        yield from ((one.symbol, one.ptx.decode()) for one in library().kernels(form, keys).values())


CASES = (
    Case("seedvr2", "fp16", 21, 1280, 720),
    Case("seedvr2", "int8", 21, 1280, 720),
    Case("wan2.1", "bf16", 33, 1280, 720),
    Case("flux", "bf16", 1, 1024, 1024),
    Case("ltx", "bf16", 41, 1280, 704),
    Case("ltx-diffusion", "bf16", 41, 1280, 704),
    Case("ltx-diffusion", "int8", 41, 1280, 704),
    Case("seedvr2", "fp16_fast", 21, 1280, 720),
    Case("wan2.2", "bf16", 17, 1280, 720),
    Case("hunyuanvideo1.5", "fp16", 17, 1280, 720),
    Case("seedvr2", "fp16", 21, 1280, 720, ("winograd",)),
    Case("wan2.1", "bf16", 33, 1280, 720, ("winograd",)),
    Case("wan2.2", "bf16", 17, 1280, 720, ("winograd",)),
    Case("hunyuanvideo1.5", "fp16", 17, 1280, 720, ("winograd",)),
    Case("flux", "bf16", 1, 1024, 1024, ("winograd",)),
    Case("qwenimage2.1", "bf16", 1, 1024, 1024),
    Case("mage", "bf16", 1, 1024, 1024),
    Case("hunyuanimage", "fp16", 1, 1024, 1024),
    Case("cogvideox", "bf16", 25, 720, 480),
    Case("mochi", "fp16", 25, 848, 480),
    Case("minimaxh3", "fp16", 17, 1344, 768),
    Case("minimaxh3", "int8", 17, 1344, 768),
    Case("wan2.1", "int8", 33, 1280, 720),
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("assemble", "measure"):
        one = commands.add_parser(name)
        one.add_argument("--card", default=CARD, help=f"whose ratio (default: {CARD})")
        one.add_argument("--cases", default="", help=f"of {', '.join(case.name for case in CASES)} (default: all)")
        one.add_argument("--folder", type=Path, required=True, help="of assembled code")
        one.add_argument("--ptxas", help="the assembler (default: Triton's)")
        one.add_argument("--factors", metavar="F32,F16,S32", help="k of each kind, in place of the measured ones")
    commands.choices["assemble"].add_argument("--jobs", type=int, default=1, help="assemblers at once (default: 1)")
    one.add_argument("--out", type=Path, required=True, help="JSON to write")
    one.add_argument("--no-knee", action="store_true", help="leave the knee out")
    one.add_argument("--title", default="", help="of the page's section")
    one.add_argument("--seconds", type=float, default=1e9, help="no case begins after so many")
    pages = commands.add_parser("page")
    pages.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args(argv)
    if args.command == "page":
        from ratio_page import write

        return write(args.files, ROOT)
    wanted = [name for name in args.cases.split(",") if name]
    if wrong := sorted(set(wanted) - {case.name for case in CASES}):
        parser.error(f"{wrong[0]!r} is no case")
    cases = [case for case in CASES if not wanted or case.name in wanted]
    return assemble(args, cases) if args.command == "assemble" else measure(args, cases)


def assemble(args: argparse.Namespace, cases: list[Case]) -> int:
    """Assemble all kernels of cases for an H100 or H200, whose rates are those of the table."""
    gpu = find(args.card, "--card").gpu
    if gpu is None:
        raise SystemExit(f"{args.card}: its figures are not kept here")
    rates = RATES["hopper"]
    ratio = Ratio(gpu, torch.device("cpu"), None, factors(rates, gpu.products), rates, 0.0, 132, args.folder,
                  args.ptxas)  # fmt: skip
    ratio = chosen(ratio, args)
    for kind in rates:
        ratio.scaled(PLAIN).code(text(kind), f"products with {kind} sums")
    form, done = prebuilt_form(gpu, 90), set()
    with recording(prebuilt("", 90, form)) as calls:
        convolution(META)()
    for one in library().kernels(form, keys_of(calls)).values():
        for k in KNEE:
            ratio.scaled(ratio.factors | {"f32": k}).code(one.ptx.decode(), one.symbol)
    with ThreadPoolExecutor(args.jobs) as pool:
        for case in cases:
            new = [(symbol, ptx) for symbol, ptx in case.texts(form) if ptx not in done]
            work = itertools.product((ratio.scaled(PLAIN), ratio), new)
            for made in [pool.submit(here.code, ptx, symbol) for here, (symbol, ptx) in work]:
                made.result()
            done.update(ptx for _, ptx in new)
            print(f"{case.name}: {len(new)} more kernels, {len(done)} in all", flush=True)
    return 0


def measure(args: argparse.Namespace, cases: list[Case]) -> int:
    """Measure cases one after the other; what fails is written down, and the exit code is 1."""
    began = time.monotonic()
    ratio = replace(ratio_of(args.card, None, torch.device("cuda", 0), args.folder), tool=args.ptxas)
    ratio = chosen(ratio, args)
    found: dict[str, Any] = {
        "title": args.title, "card": ratio.gpu.name, "rates": ratio.gpu.rates, "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0), "mhz": ratio.mhz, "processors": ratio.processors,
        "measured": dict(ratio.measured), "factors": dict(ratio.factors), "time": time.strftime("%Y-%m-%d"),
        "form": prebuilt_form(ratio.gpu, 90), "cases": [],
    }  # fmt: skip
    print(json.dumps({k: v for k, v in found.items() if k != "cases"}), flush=True)
    found["knee"] = [] if args.no_knee else list(knee(ratio))
    for case in cases:
        if time.monotonic() - began > args.seconds:
            print(f"{case.name}: left out, {args.seconds:.0f} s are over", flush=True)
            continue
        try:
            row = decode(ratio, case)
        except Exception as error:
            row = {"case": case.name, "failed": f"{type(error).__name__}: {error}"}
        found["cases"].append(case._asdict() | row)
        print(json.dumps({k: v for k, v in row.items() if k != "rows"}), flush=True)
        args.out.write_text(json.dumps(found, indent=1))
        torch.cuda.empty_cache()
        if "failed" in row and len(found["cases"]) == 1:
            return 1
    return int(any("failed" in row for row in found["cases"]))


def chosen(ratio: Ratio, args: argparse.Namespace) -> Ratio:
    """Return the ratio with the k of --factors, where that is given."""
    if args.factors is None:
        return ratio
    return ratio.scaled(dict(zip(ratio.factors, map(float, args.factors.split(",")), strict=True)))


def knee(ratio: Ratio) -> Iterator[dict[str, float]]:
    """Time one convolution at several k of sums in fp32: a unit alone would give a line through zero."""
    for k in (*KNEE, ratio.factors["f32"]):
        with ratio.scaled(ratio.factors | {"f32": k}).running():
            time = timed(convolution(ratio.device), ratio.device)
        yield {"k": k, "ms": time.median, "low": time.low, "high": time.high}


def convolution(device: torch.device) -> Callable[[], object]:
    """Return the launch of a 3x3x3 convolution of 128 channels, 4x720x1280, fp16, with residual and a norm's sums."""
    d, h, w, c = 4, 720, 1280, 128
    x = torch.zeros(d + 2, h + 2, w + 2, c, dtype=torch.float16, device=device)
    out, residual = (torch.zeros(d, h, w, c, dtype=torch.float16, device=device) for _ in range(2))
    raw, bias = torch.zeros(c, c, 3, 3, 3, device=device), torch.zeros(c, device=device)
    if device.type == "cuda":
        for tensor in (x[:, 1:-1, 1:-1], residual, raw):
            tensor.normal_(generator=torch.Generator(device).manual_seed(0))
    weight = pack_weight(raw * (27 * c) ** -0.5, torch.float16)
    health = torch.zeros((), device=device)
    return partial(conv3d, x, weight, out, epilogue=Epilogue(bias, residual, 32, health=health))


def decode(ratio: Ratio, case: Case) -> dict[str, Any]:
    """Time a decode with products as they are and at the ratio; the latter is profiled, too.

    Raises: RuntimeError where the frames differ; RatioError where torch's own libraries make products."""
    from zerowaste_vae import load

    weights, row = random_checkpoint(architecture=by_name(case.family), device=ratio.device), {"case": case.name}
    for name, k in (("plain", PLAIN), ("ratio", ratio.factors)):
        with ratio.scaled(k).running() as here:
            vae = load(copy_of(weights), precision=case.precision, device=ratio.device)
            vae.options = case.options
            data = seeded_input(vae, "decoder", case.frames, case.width, case.height)
            if name == "plain":
                if case.precision == "int8":
                    vae.decode(data)  # measures ranges
                refuse_foreign(partial(vae.decode, data), whole(vae, case))
            else:
                with counting() as fetched:
                    row["rows"] = rows(profile(vae, "decode", data, 1, fetched), case.frames)
            times, clocks = [], []
            for _ in range(RUNS):
                with sampled(clocks):
                    began = time.perf_counter()
                    frames = vae.decode(data)
                    torch.cuda.synchronize()
                    times.append(1e3 * (time.perf_counter() - began) / case.frames)
            row[name], row[f"{name}_mhz"] = vars(Spread.of(times)), statistics.median(clocks) if clocks else None
            row[f"{name}_digest"] = sha256((frames.float().cpu() + 0.0).numpy().tobytes()).hexdigest()[:12]
            row["ran"] = vae.last_report.kernels
            if here.words not in row["ran"]:
                raise RuntimeError(f"ran {row['ran']}")
            vae.release()
            del vae, frames
    if row["plain_digest"] != row["ratio_digest"]:
        raise RuntimeError(f"frames differ: {row['plain_digest']} and {row['ratio_digest']}")
    return row


def whole(vae: Any, case: Case) -> float:
    """Return the FLOP of a case."""
    size = vae.architecture.latents(case.frames), case.height // vae.spatial, case.width // vae.spatial
    return work(vae.architecture, vae.model.config, "decoder", *size).flop


@contextmanager
def sampled(clocks: list[float]) -> Iterator[None]:
    """Collect the GPU's clock (MHz, by nvidia-smi) while the block runs, but not its beginning and end."""
    done, found = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            found.extend(float(line) for line in nvidia_smi("clocks.sm"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        clocks += found[1:-1]


def rows(found: Any, frames: int) -> list[dict[str, Any]]:
    """Return a profile's rows, per frame of the clip."""
    return [{"operator": r.operator, "stage": r.stage, "what": r.what, "kind": r.kind if r.flop else None,
             "ms": r.ms / frames, "gflop": r.flop * 1e-9 / frames, "gb": r.moved * 1e-9 / frames,
             "l2_gb": r.fetched * 1e-9 / frames}
            for r in found.rows]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
