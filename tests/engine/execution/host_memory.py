"""Run in a process of its own: what host memory long decodes of 720p on a GPU take, a line of JSON for each."""

from __future__ import annotations

import json

import torch
from gpu_models import make
from zerowaste_vae.engine.extras.bench.calls import resident_bytes
from zerowaste_vae.engine.runtime.pinned import POOL

#: Target in GB, and latents.
CLIPS = ((100, 80), (4, 20))


def main() -> None:
    vae = make("seedvr2", "fp16")
    for gb, latents in CLIPS:
        z = torch.randn(1, 16, latents, 90, 160, generator=torch.Generator().manual_seed(0)).half()
        stated = vae.plan_decode(latents, 90, 160, vram_gb=gb, output="uint8").host_bytes
        vae.decode(z[:, :, :2], vram_gb=gb, output="uint8")
        idle, before, highest = POOL.idle_bytes, resident_bytes(), []
        frames = vae.decode(z, vram_gb=gb, output="uint8", progress=lambda *_: highest.append(resident_bytes()))  # noqa: B023
        sizes = {"bytes": frames.nbytes, "stated": stated, "idle": idle, "more": max(highest) - before}
        print(json.dumps(sizes), flush=True)
        del frames


if __name__ == "__main__":
    main()
