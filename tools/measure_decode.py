"""Times decode and encode of the published SeedVR2 widths (seeded random weights) on this GPU, fused against plain.

    python tools/measure_decode.py [--size 1280x720] [--frames 21] [--runs 5] [--tiling auto] [--vram-gb 0]

Prints milliseconds per frame as median (min to max) of whole calls, host memory to host memory, and the process's peak.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from zerowaste_vae.engine.models.seedvr2 import ARCHITECTURE, Config, SeedVR2
from zerowaste_vae.engine.runtime.memory import GIB
from zerowaste_vae.engine.vae import VideoVAE


def random_vae() -> VideoVAE:
    """Published widths, fp16, weights from seed 0 scaled so that activations stay of order one."""
    model = SeedVR2(Config((128, 256, 512, 512), (128, 256, 512, 512)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            draw = torch.randn(p.shape, generator=generator)
            if p.ndim >= 2:
                p.copy_(draw * (1.2 / p[0].numel() ** 0.5))
            else:
                p.copy_(1 + 0.2 * draw if "norm" in name and name.endswith("weight") else 0.1 * draw)
    device = torch.device("cuda")
    model.requires_grad_(False).to(device, torch.float16)
    return VideoVAE(model, ARCHITECTURE, "fp16", torch.float16, device)


def measure(label: str, call: Callable[[], object], frames: int, runs: int) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    each = sorted(1e3 * t / frames for t in times[1:])
    reserved, allocated = torch.cuda.max_memory_reserved() / GIB, torch.cuda.max_memory_allocated() / GIB
    print(
        f"{label:24} {statistics.median(each):7.2f} ms/frame ({each[0]:.2f} to {each[-1]:.2f})  first call "
        f"{times[0]:.2f} s  peak {reserved:.2f} GB reserved, {allocated:.2f} GB allocated",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1280x720")
    parser.add_argument("--frames", type=int, default=21)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tiling", default="auto", help="auto, untiled or blended")
    parser.add_argument("--vram-gb", type=float, default=0.0, help="memory target, 0: 81.25 %% of the card")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    width, height = map(int, args.size.split("x"))
    vae = random_vae()
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(1, 16, (args.frames - 1) // 4 + 1, height // 8, width // 8, generator=generator)
    video = torch.rand(args.frames, height, width, 3, generator=generator)
    frames = vae.frames(latent.shape[2])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {width}x{height}, {frames} frames, fp16")
    for fusion in (True, False):
        vae.triton_fusion = fusion
        vae.release()
        name = "fused" if fusion and vae.fused() else "plain torch"
        options = {"tiling": args.tiling, "vram_gb": args.vram_gb}
        size = (1, latent.shape[2], height // 8, width // 8)
        print("decode:", vae.plan_decode(*size, **options).describe())
        measure(f"decode, {name}", lambda options=options: vae.decode(latent, **options), frames, args.runs)
        vae.release()
        print("encode:", vae.plan_encode(*size, **options).describe())
        measure(f"encode, {name}", lambda options=options: vae.encode(video, **options), frames, args.runs)


if __name__ == "__main__":
    main()
