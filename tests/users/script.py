"""Encode a clip, look at the plan of its decode, and decode it: a script as users write them, in strict types."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import zerowaste_vae
from zerowaste_vae import LatentFile, Options, Plan, Report, VideoVAE, read_latent, read_video, write_latent, write_mp4


def pairs(frames: torch.Tensor) -> Iterator[torch.Tensor]:
    for first in range(0, len(frames), 2):
        yield frames[first : first + 2]


def main(weights: Path, source: Path, folder: Path) -> str:
    vae: VideoVAE = zerowaste_vae.load(weights, precision="auto", device="cpu")
    options: Options = vae.options.switched(off=["cuda_graphs"])
    vae.options = options
    frames, fps = read_video(source)
    latent: torch.Tensor = vae.encode(frames, vram_gb=4.0, progress=lambda done, total: print(f"{done} of {total}"))
    write_latent(folder / "latent.safetensors", latent, {"fps": str(fps)})
    again = read_latent(folder / "latent.safetensors", vae)
    plan: Plan = vae.plan_decode(again.shape[2], again.shape[3], again.shape[4], tiling="auto", vram_gb=4.0)
    print(plan, plan.peak_bytes)
    result = vae.decode(again, plan=plan, output="uint8", cancel=lambda: False)
    parts = list(vae.stream(LatentFile(folder / "latent.safetensors", vae), output="uint8"))
    assert torch.equal(torch.cat(parts, 1), result)
    latents = list(vae.encode_stream(pairs(frames), count=len(frames)))
    arrays = [np.asarray(frame) for frame in frames.numpy()]
    assert torch.equal(torch.cat(latents, 2), vae.encode(arrays, progress=True))
    write_mp4(folder / "result.mp4", result[0], fps)
    report: Report | None = vae.last_report
    return "" if report is None else report.text()


if __name__ == "__main__":
    try:
        print(main(*map(Path, sys.argv[1:])))
    except zerowaste_vae.InputError as error:
        sys.exit(str(error))
