"""Digests of frames and latents, to see whether a change moved a bit: same seeds, weights and calls on any checkout.

    PYTHONPATH=FOLDER python tools/frame_digests.py OLD.json                        before the change
    PYTHONPATH=FOLDER python tools/frame_digests.py NEW.json --compare OLD.json     after it

FOLDER holds the checkout to look at as zerowaste_vae. Only the package's public calls are used, so one copy of this
script serves both. On a GPU: SeedVR2, Wan 2.1 and Wan 2.2 of the published widths with seeded weights, in the 16-bit
type of each, fp8 and int8; decodes and encodes of three sizes, with room, under a target that parks histories, in
blended tiles, and of tiny frames in so many chunks that graphs replay them. The file written has for each case the
SHA-256 of the raw bytes, the plan's stated peak in bytes, and what ran. --compare prints a line for every digest and
peak that differs and exits with 1 where one does. Bits are those of one kind of GPU, torch and Triton.

--small: the demo VAE on a CPU, fp32 and int8, two sizes. --time: milliseconds per frame instead of digests, in five
calls after a first one.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GIB = 1 << 30
SHAPES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
#: Family -> its type of 16 bit.
FAMILIES = {"seedvr2": "fp16", "wan2.1": "bf16", "wan2.2": "bf16"}
#: Latents [T, h, w] by pixels per latent: 256x256 and 640x368, and a size that is odd in latents.
SIZES = {8: ((3, 32, 32), (3, 27, 45), (4, 46, 80)), 16: ((3, 16, 16), (3, 13, 23), (4, 23, 40))}
SMALL = ((2, 3, 5), (3, 4, 4))
#: Decoded and encoded three times: 61 frames in chunks of 4 latents.
TINY = (16, 6, 7)
#: Family, precision, half, [T, h, w] in latents.
TIMED = (
    ("seedvr2", "fp16", "decode", (6, 90, 160)),
    ("seedvr2", "fp16", "encode", (6, 90, 160)),
    ("seedvr2", "fp8", "decode", (6, 90, 160)),
    ("wan2.1", "bf16", "decode", (9, 90, 160)),
)
RUNS = 5


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record digests of decodes and encodes, and compare two records.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="say what differs from this earlier record")
    parser.add_argument("--small", action="store_true", help="the demo VAE on a CPU")
    parser.add_argument("--time", action="store_true", help="times instead of digests")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--cell", nargs=2, metavar=("FAMILY", "PRECISION"), help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.compare and args.time:
        parser.error("--compare looks at digests: leave out --time")
    if not args.small and not torch.cuda.is_available():
        parser.error("no CUDA GPU: --small runs on a CPU")
    if args.cell:
        found: dict[str, Any] = dict(cell(*args.cell, args.weights, args.small))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = timed(Path(folder)) if args.time else every_cell(Path(folder), args.small, args.jobs)
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.compare:
        return report(differences(json.loads(args.compare.read_text(encoding="utf-8")), found), len(found))
    return 0


def report(lines: list[str], count: int) -> int:
    print("\n".join(lines) if lines else f"{count} cases: no bit and no peak differs")
    return 1 if lines else 0


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for every case that differs or is in one record only."""
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


def every_cell(folder: Path, small: bool, jobs: int) -> dict[str, Any]:
    """All families in all precisions, a process and a cache for each: scales of 8 bit come from its first clip."""
    if small:
        files = {"demo": None}
        cells = [("demo", precision) for precision in ("fp32", "int8")]
    else:
        files = {family: seeded_file(family, folder) for family in FAMILIES}
        cells = [(family, precision) for family, own in FAMILIES.items() for precision in (own, "fp8", "int8")]

    def run(which: tuple[str, str]) -> dict[str, Any]:
        name = "-".join(which)
        command = [sys.executable, str(Path(__file__).resolve()), str(folder / f"{name}.json"), "--cell", *which]
        if files[which[0]]:
            command += ["--weights", str(files[which[0]])]
        environment = {**os.environ, "ZEROWASTE_CACHE": str(folder / f"cache-{name}"), "OMP_NUM_THREADS": "1"}
        command += ["--small"] if small else []
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

    with ThreadPoolExecutor(jobs) as pool:
        return {case: found for part in pool.map(run, cells) for case, found in part.items()}


def shapes(family: str) -> dict[str, list[int]]:
    """The published keys and shapes."""
    name, version = ("wan", family[3:]) if family.startswith("wan") else (family, None)
    found = json.loads((SHAPES / name / "keys.json").read_text(encoding="utf-8"))
    return found[version] if version else found


def seeded_file(family: str, folder: Path) -> Path:
    """A file with the published keys and shapes; under these weights activations stay of order one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for key, shape in sorted(shapes(family).items()):
        noise = torch.randn(shape, generator=generator, device=device)
        if key.endswith("gamma") or ("norm" in key and key.endswith("weight")):
            noise = 1 + 0.2 * noise
        else:
            noise *= noise[0].numel() ** -0.5 if len(shape) > 1 else 0.1
        tensors[key] = noise.to(torch.float16 if FAMILIES[family] == "fp16" else torch.bfloat16).cpu()
    path = folder / f"{family}.safetensors"
    save_file(tensors, path)
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
    """Seeded normal latent [1, C, T, h, w]."""
    return torch.randn(1, vae.latent_channels, *size, generator=torch.Generator().manual_seed(1))


def video(vae: Any, size: tuple[int, int, int]) -> Tensor:
    """Seeded frames [F, H, W, 3] in uint8 for so many latents: noise on coarse colours. Whole numbers, for the same
    bits on every CPU."""
    (count, h, w), s, generator = size, vae.spatial, torch.Generator().manual_seed(2)
    frames = vae.temporal * (count - 1) + 1
    coarse = torch.randint(32, 224, (frames, h, w, 3), generator=generator)
    coarse = coarse.repeat_interleave(s, 1).repeat_interleave(s, 2)
    return (coarse + torch.randint(-32, 32, coarse.shape, generator=generator)).to(torch.uint8)


def cell(family: str, precision: str, path: Path | None, small: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(case, what it gave), in an order that never changes: the first clip gives the scales of 8 bit."""
    vae = load(path, precision, small)
    sizes = SMALL if small else SIZES[vae.spatial]
    tile, overlap = (2, 1) if small else (12, 4)  # in latents
    tiles = {"tiling": "blended", "tile": vae.spatial * tile, "overlap": vae.spatial * overlap}
    for size in sizes:
        for half in ("decode", "encode"):
            where = f"{family} {precision} {half} {'x'.join(map(str, size))}"
            yield f"{where} roomy", case(vae, half, size, {})
            if not small:
                yield f"{where} parked", parked(vae, half, size)
            if half == "decode":
                yield f"{where} blended", case(vae, half, size, tiles)
        vae.release()
    if not small:
        for half in ("decode", "encode"):
            for call in (1, 2, 3):
                yield f"{family} {precision} {half} tiny, call {call}", case(vae, half, TINY, {})


def case(vae: Any, half: str, size: tuple[int, int, int], options: dict[str, Any]) -> dict[str, Any]:
    """Run it; the plan is asked for afterwards, when the operands of 8 bit are settled. A refusal is a result too."""
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
    """Under the highest target, in twentieths of the roomy plan's peak, that makes histories wait in host memory."""
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


def timed(folder: Path) -> dict[str, Any]:
    """Case -> milliseconds per frame: median, min, max of `RUNS` calls after a first one."""
    os.environ["ZEROWASTE_CACHE"] = str(folder / "cache")
    found, files = {}, {}
    for family, precision, half, size in TIMED:
        files[family] = files.get(family) or seeded_file(family, folder)
        vae = load(files[family], precision, False)
        source = latent(vae, size) if half == "decode" else video(vae, size).float() / 255
        frames, times = vae.temporal * (size[0] - 1) + 1, []
        for _ in range(RUNS + 1):
            begin = time.perf_counter()
            getattr(vae, half)(source)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3 / frames)
        steady = times[1:]
        name = f"{family} {precision} {half} {size[2] * vae.spatial}x{size[1] * vae.spatial} x {frames}"
        found[name] = {"median": statistics.median(steady), "min": min(steady), "max": max(steady), "runs": RUNS}
        print(f"{name}: {found[name]['median']:.2f} ms/frame ({min(steady):.2f} to {max(steady):.2f})", flush=True)
        vae.release()
        del vae, source
        gc.collect()
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    sys.exit(main())
