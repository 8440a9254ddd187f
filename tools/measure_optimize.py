"""Compare ComfyUI's own SeedVR2 VAE with the Optimize node's: seconds of the same calls, and their difference.

    python tools/measure_optimize.py --comfyui /path/to/ComfyUI [--size 96x64] [--frames 9] [--runs 5] [--cpu]

Run it with ComfyUI's Python, where the pack is importable as zerowaste_vae. The weights are random ones of the
published widths, the only ones ComfyUI's VAE takes. Calls of the two take turns. On a CPU the seconds are the process's
own, which other programs on a busy machine do not change; OMP_NUM_THREADS=1 makes them those of the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from zerowaste_vae.engine.bench.calls import Spread, in_turns
from zerowaste_vae.engine.bench.subject import PUBLISHED, check_size, noise_latent, noise_video, random_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True, help="a checkout of ComfyUI, 0.33.0 or newer")
    parser.add_argument("--size", default="96x64", help="WIDTHxHEIGHT in pixels")
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--runs", type=int, default=5, help="timed calls of each, after a first one")
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    asked = parser.parse_args()
    width, height = check_size(asked.size, 8)

    sys.path.insert(0, str(asked.comfyui))
    sys.argv = ["main.py", *(["--cpu"] if asked.cpu or not torch.cuda.is_available() else [])]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd
    from zerowaste_vae.nodes.loader import Optimize

    stock = comfy.sd.VAE(sd=random_checkpoint(PUBLISHED).tensors)
    stock.throw_exception_if_invalid()
    with torch.inference_mode():
        ours, report = Optimize.execute(vae=stock).result
        print(report, flush=True)
        latent = noise_latent(16, (asked.frames - 1) // 4 + 1, height // 8, width // 8)
        clip = noise_video(asked.frames, height, width)
        compare("decode", lambda: stock.decode(latent), lambda: ours.decode(latent), asked.runs, stock.device)
        compare("encode", lambda: stock.encode(clip), lambda: ours.encode(clip), asked.runs, stock.device)


def compare(
    name: str, stock: Callable[[], Tensor], ours: Callable[[], Tensor], runs: int, device: torch.device
) -> None:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds, results = in_turns({"stock": stock, "ours": ours}, runs, device, clock)
    each = {who: Spread.of(times[1:]) for who, times in seconds.items()}
    for who, times in each.items():
        print(f"{name} {who}: {times} s, {runs} calls")
    difference = (results["ours"].float() - results["stock"].float()).abs().max().item()
    ratio = each["ours"].median / each["stock"].median
    print(f"{name}: ours takes {ratio:.3f} of the time; largest difference {difference:.2e}", flush=True)


if __name__ == "__main__":
    main()
