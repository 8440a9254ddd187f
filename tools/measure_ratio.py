"""Time decodes of all families at the ratio of a consumer card, on an H100 or H200.

    PYTHONPATH=FOLDER python tools/measure_ratio.py assemble [--card CARD] [--cases NAMES] --folder DIR
    PYTHONPATH=FOLDER python tools/measure_ratio.py measure  [--card CARD] [--cases NAMES] --folder DIR --out FILE.json
    PYTHONPATH=FOLDER python tools/measure_ratio.py page FILES.json

FOLDER holds this checkout as zerowaste_vae. `assemble` needs no GPU: it assembles every kernel of the cases with its
products as they are and repeated, counts them, and keeps the code in DIR; give that folder to `measure`, which then
only measures. `measure` calibrates the GPU, times one kernel at several k (the knee), then each case with products as
they are and at the ratio, in the order of --cases, and compares the frames; it writes FILE.json after every case and
stops after --seconds. With --targets a case runs under targets in GB, too, and what it took is put beside what its plan
stated. `page` writes the tables of docs/ratio.md and the data that `plan --card` computes with
(engine/extras/bench/ratio.json) from such files; those of --no-rows give no data and are compared with the others'.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from zerowaste_vae.engine.extras.bench.calls import GIB, Spread, settle
from zerowaste_vae.engine.extras.bench.profile import profile
from zerowaste_vae.engine.extras.bench.ratio import PLAIN, Ratio, ratio_of
from zerowaste_vae.engine.extras.bench.ratio.foreign import refuse_foreign
from zerowaste_vae.engine.extras.bench.ratio.run import prebuilt_form
from zerowaste_vae.engine.extras.bench.ratio.traffic import counting
from zerowaste_vae.engine.extras.bench.ratio.unit import factors, text
from zerowaste_vae.engine.extras.bench.speed_limit import work
from zerowaste_vae.engine.extras.bench.subject import copy_of, random_checkpoint, seeded_input
from zerowaste_vae.engine.extras.bench.timing import measure as timed
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.kernels.conv3d import Epilogue, conv3d, pack_weight
from zerowaste_vae.engine.kernels.conv3d.winograd2d import launch as winograd
from zerowaste_vae.engine.kernels.conv3d.winograd2d.form import Form
from zerowaste_vae.engine.kernels.conv3d.winograd2d.ptx import text as winograd_text
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

ROOT = Path(__file__).resolve().parent.parent
CARD = "RTX 5070 Ti"
#: Timed calls of a case with products as they are, and at the ratio, after a first one.
RUNS = 2
#: Latents of the clip of a first call that only loads kernels: the call before it took the memory.
SHORT = 2
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
        """Yield symbol and PTX of every kernel of a prebuilt form that this decode launches, and of those in Winograd
        form, which no set holds."""
        a, fast = by_name(self.family), self.precision == "fp16_fast"
        kind = self.precision if self.precision == "int8" else None
        dtype = PRECISIONS.get(self.precision) or PRECISIONS[a.activations(self.precision, True)]
        options, config, here = self.options, a.published.config, prebuilt("", 90, form)
        walk, forms = FusedWalk(a, config, dtype, options), set[Form]()
        if "decoder" in walk.halves:
            # Kernels depend on a plane's area, not on its sides: a square of this one's launches the same.
            side = math.isqrt(self.height * self.width // (a.spatial * a.side) ** 2)
            found: set[Key] = set()
            for operands in {kind, None}:
                with recording(here) as calls, noting(forms), torch.inference_mode(False), torch.no_grad():
                    walk.use("decoder", uniform(a.program("decoder", config), operands, fast))
                    dry_run(walk, "decoder", side)
                found |= keys_of(calls)
        else:
            found = set(needs(a, config, "decoder", dtype, options, here=here, kind=kind, half_accumulate=fast))
        keys = sorted((key for key in found if library().has(form, key)), key=lambda key: key.digest)
        yield from ((one.symbol, one.ptx.decode()) for one in library().kernels(form, keys).values())
        yield from ((one.symbol, winograd_text(one)) for one in sorted(forms, key=repr))


CASES = (
    Case("seedvr2", "fp16", 21, 1280, 720),
    Case("seedvr2", "int8", 21, 1280, 720),
    Case("wan2.1", "bf16", 33, 1280, 720),
    Case("flux", "bf16", 1, 1024, 1024),
    Case("ltx", "bf16", 121, 1280, 704),
    Case("ltx-diffusion", "bf16", 41, 1280, 704),
    Case("ltx-diffusion", "int8", 41, 1280, 704),
    Case("seedvr2", "fp16_fast", 21, 1280, 720),
    Case("wan2.2", "bf16", 17, 1280, 720),
    Case("hunyuanvideo1.5", "fp16", 17, 1280, 720),
    Case("seedvr2", "fp16", 21, 1280, 720, ("winograd",)),
    Case("seedvr2", "fp16_fast", 21, 1280, 720, ("winograd",)),
    Case("seedvr2", "int8", 21, 1280, 720, ("winograd",)),
    Case("wan2.1", "bf16", 33, 1280, 720, ("winograd",)),
    Case("wan2.2", "bf16", 17, 1280, 720, ("winograd",)),
    Case("hunyuanvideo1.5", "fp16", 17, 1280, 720, ("winograd",)),
    Case("flux", "bf16", 1, 1024, 1024, ("winograd",)),
    Case("ltx", "bf16", 121, 1280, 704, ("winograd",)),
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
        one.add_argument("--cases", default="", metavar="NAME[:RUNS[:PLAIN]],...",
                         help="how often each is timed at the ratio and with products as they are (default: "
                         f"{RUNS}, as often), of {', '.join(case.name for case in CASES)} (default: all)")  # fmt: skip
        one.add_argument("--folder", type=Path, required=True, help="of assembled code")
        one.add_argument("--ptxas", help="the assembler (default: Triton's)")
        one.add_argument("--factors", metavar="F32,F16,S32", help="k of each kind, in place of the measured ones")
    commands.choices["assemble"].add_argument("--jobs", type=int, default=1, help="assemblers at once (default: 1)")
    one.add_argument("--out", type=Path, required=True, help="JSON to write")
    one.add_argument("--no-knee", action="store_true", help="leave the knee out")
    one.add_argument("--title", default="", help="of the page's section")
    one.add_argument("--seconds", type=float, default=1e9, help="no case begins after so many")
    one.add_argument("--no-rows", action="store_true", help="do not time operators one by one")
    one.add_argument("--db", action="store_true", help=f"compare {SHORT} latents' frames with fp32 on plain torch")
    one.add_argument("--targets", default="", metavar="GB,GB", help="targets under which cases run (default: none)")
    pages = commands.add_parser("page")
    pages.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args(argv)
    if args.command == "page":
        from ratio_page import write

        return write(args.files, ROOT)
    named, wanted = {case.name: case for case in CASES}, []
    for one in args.cases.split(",") if args.cases else named:
        name, *counts = one.split(":")
        if name not in named or len(counts) > 2 or not all(map(str.isdecimal, counts)):
            parser.error(f"{one!r} is no case")
        runs = [int(count) for count in counts] or [RUNS]
        wanted.append((named[name], runs[0], runs[-1]))
    if args.command == "assemble":
        return assemble(args, [case for case, *_ in wanted])
    return measure(args, wanted)


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


def measure(args: argparse.Namespace, cases: list[tuple[Case, int, int]]) -> int:
    """Measure cases one after the other, each timed so often at the ratio and with products as they are; what fails is
    written down, and the exit code is 1."""
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
    targets = [float(one) for one in args.targets.split(",") if one] or [None]
    for (case, *runs), target in itertools.product(cases, targets):
        if (spent := time.monotonic() - began) > args.seconds:
            print(f"{case.name}: left out, {args.seconds:.0f} s are over", flush=True)
            continue
        try:
            row = decode(ratio, case, runs, target, not args.no_rows)
            if args.db:
                row["db"] = decibels(ratio, case)
        except Exception as error:
            row = {"case": case.name, "failed": f"{type(error).__name__}: {error}"}
        row["began_s"], row["target_gb"] = round(spent, 1), target
        found["cases"].append(case._asdict() | row)
        print(json.dumps({k: v for k, v in row.items() if k != "rows"}), flush=True)
        args.out.write_text(json.dumps(found, indent=1))
    return int(any("failed" in row for row in found["cases"]))


def chosen(ratio: Ratio, args: argparse.Namespace) -> Ratio:
    """Return the ratio with the k of --factors, where that is given, and with the clock at which the GPU's products are
    k times the card's: as many in a second, so another clock means other products in a clock."""
    if args.factors is None:
        return ratio
    k = dict(zip(ratio.factors, map(float, args.factors.split(",")), strict=True))
    rates = {kind: k[kind] * rate for kind, rate in ratio.gpu.products.items()}
    return replace(ratio, factors=k, measured=rates, mhz=ratio.mhz * ratio.measured["f32"] / rates["f32"])


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


@contextmanager
def noting(forms: set[Form]) -> Iterator[None]:
    """Add the texts in Winograd form that dry runs inside would launch."""
    own = winograd.form_of

    def noted(*given: Any) -> Form:
        form = own(*given)
        forms.add(form)
        return form

    winograd.form_of = noted
    try:
        yield
    finally:
        winograd.form_of = own


@functools.lru_cache(maxsize=1)
def weights(family: str, device: torch.device, host: bool) -> Any:
    """Return a family's seeded weights, drawn on a device and moved to the host where that is asked for; those of the
    last family are kept."""
    made = random_checkpoint(architecture=by_name(family), device=device)
    return replace(made, tensors={name: t.cpu() for name, t in made.tensors.items()}) if host else made


def decode(ratio: Ratio, case: Case, runs: list[int], target: float | None, watched: bool) -> dict[str, Any]:
    """Time a decode with products as they are and at the ratio.

    Args:
        ratio: the card's.
        case: the decode.
        runs: timed calls at the ratio and with products as they are; 0: none at the ratio.
        target: GB that its plan keeps, None: the card's. What it took is put beside what was stated.
        watched: at the ratio operators are timed one by one, too (under no target).

    Raises: RuntimeError where the frames differ; RatioError where torch's own libraries make products."""
    from zerowaste_vae import load

    # What the process holds for others is taken from a target.
    source = weights(case.family, ratio.device, target is not None)
    row: dict[str, Any] = {"case": case.name}
    settle(ratio.device)
    held, before = torch.cuda.memory_reserved(), None
    for name, k, count in (("plain", PLAIN, runs[1]), ("ratio", ratio.factors, runs[0])):
        if not count:
            continue
        with ratio.scaled(k).running() as here:
            vae = load(copy_of(source), precision=case.precision, device=ratio.device)
            vae.options = case.options
            first = min(case.frames, vae.architecture.frames(SHORT))
            short, data = (seeded_input(vae, "decoder", n, case.width, case.height) for n in (first, case.frames))
            run = partial(vae.decode, vram_gb=target)
            if case.precision == "int8":
                run(short)  # measures ranges
            if name == "plain":
                refuse_foreign(partial(run, data), whole(vae, case))
                if target:  # from here on memory is what calls in a row take
                    settle(ratio.device)
            elif watched and target is None:
                with counting() as fetched:
                    row["rows"] = rows(profile(vae, "decode", data, 1, fetched), case.frames)
            else:
                run(short)
            times = []
            for _ in range(count):
                began = time.perf_counter()
                frames = run(data)
                torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - began) / case.frames)
            row[name] = vars(Spread.of(times))
            report = vae.last_report
            row |= {"ran": report.kernels, "plan": report.plan, "off": report.off}
            if name == "plain":
                taken = (torch.cuda.max_memory_reserved() - held) / GIB
                row |= {"stated_gb": report.predicted_gb, "reserved_gb": taken}
            if here.words not in row["ran"]:
                raise RuntimeError(f"ran {row['ran']}")
            vae.release_packed()
            del vae, run
            if before is not None and not torch.equal(before, frames):
                raise RuntimeError("frames at the ratio differ from those with products as they are")
            before = frames
    return row


def decibels(ratio: Ratio, case: Case) -> float:
    """Return the PSNR (peak 2, not clamped) of a case's first latents against fp32 on plain torch."""
    with ratio.scaled(PLAIN).running():
        off = short_frames(case.family, case.precision, case.width, case.height, case.options, ratio.device)
    off = off - short_frames(case.family, "fp32", case.width, case.height, DEFAULTS, ratio.device)
    return 10 * math.log10(4 / off.double().square_().mean().item())


@functools.lru_cache(maxsize=2)
def short_frames(
    family: str, precision: str, width: int, height: int, options: Options, device: torch.device
) -> torch.Tensor:  # fmt: skip
    """Return the frames of a family's first latents as the network makes them. Those of fp32 stay for the next case."""
    from zerowaste_vae import load

    vae = load(copy_of(weights(family, device, False)), precision=precision, device=device)
    vae.options = options
    frames = vae.decode(seeded_input(vae, "decoder", vae.architecture.frames(SHORT), width, height), range="signed")
    vae.release_packed()
    return frames


def whole(vae: Any, case: Case) -> float:
    """Return the FLOP of a case."""
    size = vae.architecture.latents(case.frames), case.height // vae.spatial, case.width // vae.spatial
    return work(vae.architecture, vae.model.config, "decoder", *size).flop


def rows(found: Any, frames: int) -> list[dict[str, Any]]:
    """Return a profile's rows, per frame of the clip."""
    return [{"operator": r.operator, "stage": r.stage, "what": r.what, "kind": r.kind if r.flop else None,
             "ms": r.ms / frames, "gflop": r.flop * 1e-9 / frames, "gb": r.moved * 1e-9 / frames,
             "l2_gb": r.fetched * 1e-9 / frames}
            for r in found.rows]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
