"""Compare the prebuilt kernels with Triton's code of the same generation on this GPU: bits, time and launches.

    PYTHONPATH=FOLDER python tools/measure_prebuilt.py [--forms A,C] [--families seedvr2,wan2.1,...] [--quick | --times]

FOLDER holds this checkout as zerowaste_vae. For each form, in processes of their own: the first decode of an
installation and of a later process beside a steady one, with Triton's import blocked; ms a frame both ways;
microseconds of a launch on the host; and for each family whether a decode and an encode have the same bits both ways.
Triton has to be the one that the sets are made with. Prints one line of JSON for each; exit code 1 where bits differ.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch

#: Form -> what Triton takes for the generation whose code it is.
OVERRIDES = {"A": "sm80", "B": "sm89", "C": "sm120"}
#: Family -> frames and size of its clip.
CLIPS = {"seedvr2": (21, 640, 352), "wan2.1": (21, 640, 352), "flux": (1, 1024, 1024), "ltx": (17, 640, 352),
         "minimaxh3": (17, 256, 256)}  # fmt: skip
#: What is timed: the clip of the README's tables.
TIMED, RUNS = (21, 1280, 720), 6
NO_ENCODER = "no encoder"
#: Processes that compare bits at once.
TOGETHER = 8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", default="A,C", help="letters of prebuilt sets (default: A,C)")
    parser.add_argument("--families", default=",".join(CLIPS), help=f"of {', '.join(CLIPS)} (default: all)")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--quick", action="store_true", help="bits alone, no times")
    part.add_argument("--times", action="store_true", help="times alone, and the bits of what is timed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        return one(json.loads(args.one))
    forms, families = args.forms.split(","), args.families.split(",")
    for name, known in [*((form, OVERRIDES) for form in forms), *((family, CLIPS) for family in families)]:
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here")
    wrong = 0
    if not args.quick:
        wrong += sum(not times(form) for form in forms)
    asked = [] if args.times else itertools.product(forms, families, ("decode", "encode"))
    with ThreadPoolExecutor(TOGETHER) as pool:
        for found in pool.map(lambda ask: equal(*ask), asked):
            print(json.dumps(found), flush=True)
            wrong += found["equal"] is False
    return int(wrong > 0)


def times(form: str) -> bool:
    """Print what first decodes take, what a frame takes both ways, and what a launch does. Returns whether both ways
    give the same bits."""
    ask = {"form": form, "family": "seedvr2", "half": "decode", "clip": TIMED, "runs": RUNS}
    with tempfile.TemporaryDirectory() as cache:
        first, later = (child(ask | {"triton": False}, CUDA_CACHE_PATH=cache) for _ in range(2))
        small = ask | {"clip": (21, 128, 128), "launches": True, "triton": False}
        launches = child(small, CUDA_CACHE_PATH=cache)
    child(ask | {"triton": True, "runs": 1})  # fills Triton's cache
    native, more = child(ask | {"triton": True}), child(small | {"triton": True})
    beyond = {name: round(found["seconds"][0] - found["steady"], 2) for name, found in
              {"installation": first, "process": later}.items()}  # fmt: skip
    same = first["digest"] == native["digest"]
    print(json.dumps({
        "form": form, "seconds beyond a steady decode": beyond, "equal": same,
        "ms a frame": {"prebuilt": first["ms_frame"], "Triton": native["ms_frame"]},
        "us a launch": {"prebuilt": launches["us_launch"], "Triton": more["us_launch"]}, "ran": first["ran"],
    }), flush=True)  # fmt: skip
    return same


def equal(form: str, family: str, half: str) -> dict[str, Any]:
    """Return whether both ways give the same bits; None where there is no such half."""
    ask = {"form": form, "family": family, "half": half, "clip": CLIPS[family], "runs": 1}
    # torch takes a thread for every core by default, and eight such processes would wait for each other.
    threads = str(max(1, (os.cpu_count() or 1) // TOGETHER))
    both = [child(ask | {"triton": triton}, OMP_NUM_THREADS=threads) for triton in (False, True)]
    ran = [found["ran"] for found in both]
    same = None
    if ran[0] != NO_ENCODER:
        same = both[0]["digest"] == both[1]["digest"] and ran == [f"prebuilt kernels, set {form}", "Triton's kernels"]
    return {"form": form, "family": family, "half": half, "equal": same, "ran": ran}


def child(ask: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Return what a process of its own measured. Raises RuntimeError with its last lines where it failed."""
    made = {**os.environ, **environment}
    if ask["triton"]:
        made["TRITON_OVERRIDE_ARCH"] = OVERRIDES[ask["form"]]
    command = [sys.executable, __file__, "--one", json.dumps(ask)]
    done = subprocess.run(command, env=made, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


# -- in a process of its own -------------------------------------------------------------------------------------------


def one(ask: dict[str, Any]) -> int:
    """Decode or encode as `child` was asked, and print what came of it."""
    if not ask["triton"]:
        sys.modules["triton"] = None  # type: ignore[assignment]
    from zerowaste_vae import load
    from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
    from zerowaste_vae.engine.families import by_name

    with in_form(ask) as kernels:
        vae = load(random_checkpoint(architecture=by_name(ask["family"])), device="cuda")
        vae.options = replace(vae.options, kernels=kernels, cuda_graphs=False)
        print(json.dumps(measured(vae, ask)))
    return 0


def measured(vae: Any, ask: dict[str, Any]) -> dict[str, Any]:
    """Return what decodes or encodes took and made."""
    count, width, height = ask["clip"]
    a, draw = vae.architecture, torch.Generator().manual_seed(1)
    latents = a.latents(a.filled(count))
    if ask["half"] == "encode":
        if not vae.can_encode:
            return {"digest": "", "ran": NO_ENCODER}
        work = functools.partial(vae.encode, torch.rand(1, vae.frames(latents), height, width, 3, generator=draw))
    else:
        size = latents, height // vae.spatial, width // vae.spatial
        work = functools.partial(vae.decode, torch.randn(1, vae.latent_channels, *size, generator=draw))
    torch.zeros(1, device="cuda")
    seconds = []
    for _ in range(ask["runs"]):
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    steady = statistics.median(seconds[1:] or seconds)
    found = {"seconds": seconds, "steady": steady, "ms_frame": round(1e3 * steady / out.shape[1], 2),
             "digest": sha256(out.cpu().numpy().tobytes()).hexdigest(), "ran": vae.last_report.kernels}  # fmt: skip
    if ask.get("launches"):
        found["us_launch"] = launch_cost(functools.partial(work, chunk=1))
    return found


@contextmanager
def in_form(ask: dict[str, Any]) -> Iterator[str]:
    """Run the prebuilt form inside, or Triton's code of the same form. Yields what `Options.kernels` is."""
    from zerowaste_vae.engine.kernels import targets

    if not ask["triton"]:
        yield ask["form"]
        return
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    here = targets.prebuilt(name, 10 * major + minor, ask["form"])
    with targets.standing_in(replace(here, way="triton", triton=targets.triton_version())):
        yield "triton"


def launch_cost(work: Any) -> float:
    """Return the microseconds that the host takes for a launch, in a decode that the GPU does not hold up."""
    from zerowaste_vae.engine.kernels import launching

    spent, made = [], launching.launcher

    class Timed:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launch = self._kernel[grid]

            def timed(*arguments: Any, **constants: Any) -> None:
                began = time.perf_counter()
                launch(*arguments, **constants)
                spent.append(time.perf_counter() - began)

            return timed

    users = [module for module in list(sys.modules.values()) if getattr(module, "launcher", None) is made]
    for module in users:
        module.launcher = lambda name, here: Timed(made(name, here))
    try:
        torch.cuda.synchronize()
        work()
    finally:
        for module in users:
            module.launcher = made
    return round(1e6 * sum(spent) / len(spent), 1)


if __name__ == "__main__":
    sys.exit(main())
