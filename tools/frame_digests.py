"""Record digests of frames and latents, to see if a change moved a bit: same seeds, weights and calls on any checkout.

    PYTHONPATH=FOLDER python tools/frame_digests.py OLD.json                        before the change
    PYTHONPATH=FOLDER python tools/frame_digests.py NEW.json --compare OLD.json     after it

FOLDER holds the checkout to examine as zerowaste_vae. Only the package's public calls and its list of architectures are
used, so one copy of this script serves both. On a GPU it runs every family (--families: only some) of the published
widths with seeded weights, in its type of 16 bit, SeedVR2 and the Wans in fp8 and int8 too; decodes and encodes of
three sizes, with room, under a target that parks histories, in blended tiles, and of tiny frames in so many chunks that
graphs replay them. The written file has for each case the SHA-256 of the raw bytes, the plan's stated peak in bytes,
and the path that ran. --compare prints a line for every digest and peak that differs and exits with 1 where one does.
Bits are those of one kind of GPU, torch and Triton. The record is written after every family and precision; with
--go-on those that it has are not run again.

--small: the demo VAE on a CPU, fp32 and int8, two sizes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GIB = 1 << 30
#: Families that run in these precisions, besides their type of 16 bit.
FEWER_BITS = {family: ("fp8", "int8") for family in ("seedvr2", "wan2.1", "wan2.2")}
#: Latents [T, h, w] by pixels per latent: 256x256 and 640x368 (or near it), and a size that is odd in latents.
SIZES = {
    8: ((3, 32, 32), (3, 27, 45), (4, 46, 80)),
    16: ((3, 16, 16), (3, 13, 23), (4, 23, 40)),
    32: ((3, 8, 8), (3, 7, 13), (4, 12, 20)),
}
SMALL = ((2, 3, 5), (3, 4, 4))
#: Decoded and encoded three times: 61 frames in chunks of 4 latents.
TINY = (16, 6, 7)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record digests of decodes and encodes, and compare two records.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="say what differs from this earlier record")
    parser.add_argument("--small", action="store_true", help="the demo VAE on a CPU")
    parser.add_argument("--families", nargs="+", metavar="F", help="only these (default: all)")
    parser.add_argument("--go-on", action="store_true", help="keep what the output has, and run what it lacks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--cell", nargs=2, metavar=("FAMILY", "PRECISION"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.small and not torch.cuda.is_available():
        parser.error("no CUDA GPU: --small runs on a CPU")
    if args.small and args.families:
        parser.error("--families: --small looks at the demo VAE only")
    if not args.output.parent.is_dir():
        parser.error(f"{args.output}: its folder does not exist")
    old = None
    if args.compare:
        if args.output.exists() and args.compare.exists() and args.output.samefile(args.compare):
            parser.error(f"{args.output}: would replace the record that it is compared with; name another file")
        try:
            old = json.loads(args.compare.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            parser.error(f"--compare {args.compare}: cannot be read ({error})")
    with tempfile.TemporaryDirectory() as folder:
        if args.cell:
            path = None if args.small else seeded_file(args.cell[0], Path(folder))
            found = write(args.output, dict(cell(*args.cell, path, args.small)))
        else:
            found = json.loads(args.output.read_text(encoding="utf-8")) if args.go_on and args.output.exists() else {}
            found = every_cell(found, args.output, Path(folder), args.small, args.jobs, args.families)
    return 0 if old is None else report(differences(old, found), len(found))


def report(lines: list[str], count: int) -> int:
    print("\n".join(lines) if lines else f"{count} cases: no bit and no peak differs")
    return 1 if lines else 0


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a line for every case that differs or is in one record only."""
    lines = [f"{case}: only in the old record" for case in old if case not in new]
    for case, now in new.items():
        before = old.get(case)
        if before is None:
            lines.append(f"{case}: only in the new record")
            continue
        if before["digest"] != now["digest"]:
            lines.append(f"{case}: other bits ({before['digest'][:12]} -> {now['digest'][:12]}; {now['ran']})")
        if before["peak"] != now["peak"]:
            lines.append(f"{case}: other peak ({before['peak']} -> {now['peak']} bytes)")
    return lines


def write(output: Path, found: dict[str, Any]) -> dict[str, Any]:
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def every_cell(
    found: dict[str, Any], output: Path, folder: Path, small: bool, jobs: int, families: list[str] | None
) -> dict[str, Any]:
    """Run what is not found yet of all families in their precisions, with a process and a cache for each: 8-bit scales
    come from its first clip."""
    if small:
        cells = [("demo", precision) for precision in ("fp32", "int8")]
    else:
        own = {name: a.native for name, a in architectures().items() if not families or name in families}
        if strange := set(families or ()) - own.keys():
            raise SystemExit(f"no family is called {', '.join(strange)}: there are {', '.join(architectures())}")
        cells = [(name, precision) for name in own for precision in (own[name], *FEWER_BITS.get(name, ()))]
    cells = [pair for pair in cells if not any(case.startswith("{} {} ".format(*pair)) for case in found)]

    def run(which: tuple[str, str]) -> dict[str, Any]:
        name = "-".join(which)
        command = [sys.executable, str(Path(__file__).resolve()), str(folder / f"{name}.json"), "--cell", *which]
        environment = {**os.environ, "ZEROWASTE_CACHE": str(folder / f"cache-{name}"), "OMP_NUM_THREADS": "1"}
        command += ["--small"] if small else []
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for ended in as_completed([pool.submit(run, which) for which in cells]):
            if error := ended.exception():
                failed.append(str(error))
            else:
                found = write(output, {**found, **ended.result()})
    if failed:  # the others are in the record
        raise SystemExit("\n".join(failed))
    return found


def architectures() -> dict[str, Any]:
    from zerowaste_vae.engine.families import ARCHITECTURES

    return {a.name: a for a in ARCHITECTURES}


def shapes(family: str) -> dict[str, list[int]]:
    """Return the published keys and shapes."""
    architecture = architectures()[family]
    with torch.device("meta"):
        state = architecture.build(architecture.published.config).state_dict()
    return {key: list(tensor.shape) for key, tensor in state.items()}


def seeded_file(family: str, folder: Path) -> Path:
    """Write a file with the published keys and shapes; under these weights activations stay of order one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float16 if architectures()[family].native == "fp16" else torch.bfloat16
    tensors = {}
    for key, shape in sorted(shapes(family).items()):
        noise = torch.randn(shape, generator=generator, device=device)
        if key.endswith("gamma") or ("norm" in key and key.endswith("weight")):
            noise = 1 + 0.2 * noise
        elif key.endswith(("running_var", "std-of-means", "latent_std", "latents_std", "vae_scale")):
            noise = 0.5 + noise.abs()
        else:
            noise *= noise[0].numel() ** -0.5 if len(shape) > 1 else 0.1
        tensors[key] = noise.to(dtype).cpu()
    path = folder / f"{family}.safetensors"
    # LTX's shapes alone fit another network, too.
    save_file(tensors, path, dict(architectures()[family].published.metadata))
    del tensors
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return path


def load(path: Path | None, precision: str, small: bool) -> Any:
    import zerowaste_vae

    vae = zerowaste_vae.load(path or zerowaste_vae.demo_vae_path(), precision, "cpu" if small else "cuda")
    if vae.precision != precision:
        raise SystemExit(f"{precision} does not run here: {vae.precision} does")
    return vae


def latent(vae: Any, size: tuple[int, int, int]) -> Tensor:
    """Return a seeded normal latent [1, C, T, h, w]; for an image VAE T pictures [T, C, h, w]."""
    z = torch.randn(1, vae.latent_channels, *size, generator=torch.Generator().manual_seed(1))
    return z[0].transpose(0, 1).contiguous() if vae.architecture.still else z


def video(vae: Any, size: tuple[int, int, int]) -> Tensor:
    """Return seeded frames or pictures [F, H, W, 3] in uint8 for so many latents: noise on coarse colours. Whole
    numbers give the same bits on every CPU."""
    (count, h, w), s, generator = size, vae.spatial, torch.Generator().manual_seed(2)
    frames = vae.architecture.frames(count)
    coarse = torch.randint(32, 224, (frames, h, w, 3), generator=generator)
    coarse = coarse.repeat_interleave(s, 1).repeat_interleave(s, 2)
    return (coarse + torch.randint(-32, 32, coarse.shape, generator=generator)).to(torch.uint8)


def cell(family: str, precision: str, path: Path | None, small: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (case, result) in an order that never changes: the first clip gives the 8-bit scales."""
    vae = load(path, precision, small)
    sizes = SMALL if small else SIZES[vae.spatial]
    tile, overlap = (2, 1) if small else (12, 4)  # in latents
    tiles = {"tiling": "blended", "tile": vae.spatial * tile, "overlap": vae.spatial * overlap}
    halves = ("decode", "encode") if vae.can_encode else ("decode",)
    for size in sizes:
        for half in halves:
            where = f"{family} {precision} {half} {'x'.join(map(str, size))}"
            yield f"{where} roomy", case(vae, half, size, {})
            if not small:
                yield f"{where} parked", parked(vae, half, size)
            if half == "decode":
                yield f"{where} blended", case(vae, half, size, tiles)
        vae.release()
    if not small:
        for half in halves:
            for call in (1, 2, 3):
                yield f"{family} {precision} {half} tiny, call {call}", case(vae, half, TINY, {})


def case(vae: Any, half: str, size: tuple[int, int, int], options: dict[str, Any]) -> dict[str, Any]:
    """Run one case; the plan is made afterwards, when the 8-bit operands are settled. A refusal is a result too."""
    import zerowaste_vae

    try:
        out = vae.decode(latent(vae, size), **options) if half == "decode" else vae.encode(video(vae, size), **options)
    except zerowaste_vae.PlanError as error:
        return {"digest": "refused", "peak": 0, "ran": str(error)}
    ran = f"{vae.last_report.mode}; {vae.last_report.plan}"
    digest = hashlib.sha256(out.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    return {"digest": digest, "peak": plan_of(vae, half)(*size, **options).peak_bytes, "ran": ran}


def plan_of(vae: Any, half: str) -> Callable[..., Any]:
    return vae.plan_decode if half == "decode" else vae.plan_encode


def parked(vae: Any, half: str, size: tuple[int, int, int]) -> dict[str, Any]:
    """Run one case under the highest target, in twentieths of the roomy plan's peak, that makes histories wait in host
    memory."""
    import zerowaste_vae

    plan, room = plan_of(vae, half), {"ram_gb": 8.0}
    peak = plan(*size).peak_bytes / GIB
    for share in range(19, 0, -1):
        options = {"vram_gb": share / 20 * peak, **room}
        try:
            parks = plan(*size, tiling="untiled", **options).host_bytes
        except zerowaste_vae.PlanError:
            break
        if parks:
            return case(vae, half, size, {"tiling": "untiled", **options})
    return {"digest": "none", "peak": 0, "ran": "no target makes it park"}


if __name__ == "__main__":
    sys.exit(main())
