"""Compiles what the GPU tests run, in a process of its own: python warm_kernels.py MODEL PRECISION

Triton compiles on one core, some 30 s for each network in each precision, and keeps the result on disk. Processes side
by side, one for each of CELLS, do in a minute what the tests, one after the other, would take seven for.
"""

from __future__ import annotations

import sys

import torch

#: Model, precision, sizes in latents [T, h, w].
SMALL, TINY = ((4, 21, 13),), ((16, 6, 7), (4, 9, 7))
CELLS = {
    **{("seedvr2", precision): ((4, 42, 27), (2, 90, 160)) for precision in ("fp16", "fp8", "int8")},
    ("seedvr2", "bf16"): ((6, 48, 64),),
    **{(f"wan2.{n}", precision): SMALL for n in (1, 2) for precision in ("bf16", "fp8", "int8")},
    ("seedvr2-small", "fp16"): ((6, 48, 64), (5, 8, 8)),
    ("seedvr2-tiny", "fp16"): TINY,
    **{(f"wan2.{n}-tiny", "bf16"): TINY for n in (1, 2)},
    **{("seedvr2-8-bit", precision): ((3, 6, 7),) for precision in ("fp16", "fp8", "int8")},
    **{("flux", precision): ((3, 37, 21),) for precision in ("bf16", "fp16", "fp8", "int8")},
    ("ltx", "bf16"): ((6, 7, 9),),
    ("mochi", "fp16"): ((4, 20, 24),),
    ("hunyuanvideo", "bf16"): ((5, 14, 11),),
    ("hunyuanvideo1.5", "fp16"): ((4, 7, 6),),
}


def main(name: str, precision: str) -> None:
    from gpu_models import make
    from zerowaste_vae import PlanError

    vae = make(name, precision)
    encodes = vae.can_encode and vae.planner.walk.why_not("encoder") is None
    for i, (latents, h, w) in enumerate(CELLS[name, precision]):
        z = torch.randn(1, vae.latent_channels, latents, h, w)
        video = torch.randint(256, (4 * latents - 3, vae.spatial * h, vae.spatial * w, 3), dtype=torch.uint8)
        for output in ("float32", "uint8"):
            vae.decode(z, output=output)
        if encodes:
            vae.encode(video)
        if i:  # kernels know whether a plane is small, and nothing else of its size
            continue
        for options in ({"chunk": 1}, {"tiling": "blended", "tile": 96, "overlap": 32}):
            for output in ("float32", "uint8"):
                vae.decode(z, output=output, **options)
        peak = vae.plan_decode(latents, h, w).peak_bytes / 2**30
        for share in (0.8, 0.6):  # in bands, or with histories parked
            for work, source in ((vae.decode, z), *([(vae.encode, video)] if encodes else [])):
                try:
                    work(source, vram_gb=share * peak, ram_gb=8, tiling="untiled")
                except PlanError:
                    continue


if __name__ == "__main__":
    main(*sys.argv[1:])
