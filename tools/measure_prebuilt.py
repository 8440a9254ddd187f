"""Compare the prebuilt kernels with Triton's code of the same generation on this GPU: bits, time and launches.

    PYTHONPATH=FOLDER python tools/measure_prebuilt.py [--forms A,C] [--families seedvr2,wan2.1,...] [--quick]

FOLDER holds this checkout as zerowaste_vae. For each form, in processes of their own: the first decode of an
installation and of a later process beside a steady one, with Triton's import blocked; ms a frame both ways;
microseconds of a launch on the host; and for each family whether a decode and an encode have the same bits both ways.
Triton has to be the one that the sets are made with. Prints one line of JSON for each; exit code 1 where bits differ.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", default="A,C", help="letters of prebuilt sets (default: A,C)")
    parser.add_argument("--families", default=",".join(CLIPS), help=f"of {', '.join(CLIPS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="bits alone, no times")
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
    for form in forms:
        if not args.quick:
            times(form)
        with ThreadPoolExecutor(8) as pool:
            asked = [(family, half) for family in families for half in ("decode", "encode")]
            for found in pool.map(lambda ask, form=form: equal(form, *ask), asked):
                print(json.dumps(found), flush=True)
                wrong += found["equal"] is False
    return int(wrong > 0)


def times(form: str) -> None:
    """Print what first decodes take, what a frame takes both ways, and what a launch does."""
    ask = {"form": form, "family": "seedvr2", "half": "decode", "clip": TIMED, "runs": RUNS}
    with tempfile.TemporaryDirectory() as cache:
        first, later = (child(ask | {"triton": False}, CUDA_CACHE_PATH=cache) for _ in range(2))
        small = ask | {"clip": (21, 128, 128), "launches": True, "triton": False}
        launches = child(small, CUDA_CACHE_PATH=cache)
    child(ask | {"triton": True, "runs": 1})  # fills Triton's cache
    native, more = child(ask | {"triton": True}), child(small | {"triton": True})
    beyond = {name: round(found["seconds"][0] - found["steady"], 2) for name, found in
              {"installation": first, "process": later}.items()}  # fmt: skip
    print(json.dumps({
        "form": form, "seconds beyond a steady decode": beyond, "equal": first["digest"] == native["digest"],
        "ms a frame": {"prebuilt": first["ms_frame"], "Triton": native["ms_frame"]},
        "us a launch": {"prebuilt": launches["us_launch"], "Triton": more["us_launch"]}, "ran": first["ran"],
    }), flush=True)  # fmt: skip


def equal(form: str, family: str, half: str) -> dict[str, Any]:
    """Return whether both ways give the same bits; None where one of them does not run fused."""
    ask = {"form": form, "family": family, "half": half, "clip": CLIPS[family], "runs": 1}
    both = [child(ask | {"triton": triton}) for triton in (False, True)]
    fused = all(found.get("fused") for found in both)
    same = both[0]["digest"] == both[1]["digest"] if fused else None
    return {"form": form, "family": family, "half": half, "equal": same, "ran": [found["ran"] for found in both]}


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
    from zerowaste_vae.engine.archs import by_name
    from zerowaste_vae.engine.bench.subject import random_checkpoint

    vae = load(random_checkpoint(architecture=by_name(ask["family"])), device="cuda")
    in_form(vae, ask)
    count, width, height = ask["clip"]
    a, draw = vae.architecture, torch.Generator().manual_seed(1)
    latents = a.latents(a.filled(count))
    if ask["half"] == "encode":
        if not vae.can_encode:
            print(json.dumps({"digest": "", "ran": "no encoder", "fused": False}))
            return 0
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
    steady = sorted(seconds[1:])[len(seconds[1:]) // 2] if seconds[1:] else seconds[0]
    report = vae.last_report
    found = {"seconds": seconds, "steady": steady, "ms_frame": round(1e3 * steady / out.shape[1], 2),
             "digest": sha256(out.cpu().numpy().tobytes()).hexdigest(), "ran": report.kernels,
             "fused": report.mode.startswith("fused")}  # fmt: skip
    if ask.get("launches"):
        found["us_launch"] = launch_cost(functools.partial(work, chunk=1))
    print(json.dumps(found))
    return 0


def in_form(vae: Any, ask: dict[str, Any]) -> None:
    """Have a VAE run the prebuilt form, or Triton's code of the same form."""
    from zerowaste_vae.engine.kernels import targets

    if not ask["triton"]:
        vae.options = replace(vae.options, kernels=ask["form"], cuda_graphs=False)
        return
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    here = targets.prebuilt(name, 10 * major + minor, ask["form"])
    targets.standing_in(replace(here, way="triton", triton=targets.triton_version())).__enter__()
    vae.options = replace(vae.options, kernels="triton", cuda_graphs=False)


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
