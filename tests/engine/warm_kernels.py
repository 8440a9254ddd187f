"""Compiles what the GPU tests run, in a process of its own: python warm_kernels.py MODEL PRECISION HALF

Triton compiles on one core, some 30 s for each network in each precision, and keeps the result on disk. Processes side
by side, one for each of CELLS, do in a minute what the tests, one after the other, would take seven for.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from zerowaste_vae.engine.options import DEFAULTS, TOGGLES

#: Latents [T, h, w].
SMALL, TINY, LARGE = ((4, 21, 13),), ((16, 6, 7), (4, 9, 7)), ((4, 42, 27), (2, 90, 160), (2, 18, 23))
HALVES = ("decode", "encode")
#: Each toggle off, and all of them.
SWITCHED = (*([toggle] for toggle in TOGGLES), list(TOGGLES))
#: (model and form, precision, half or halves) -> sizes. Tests of the first models run first.
CELLS = {
    **{key: ((7, 20, 24),) for key in product(["minimaxh3"], ["fp16", "fp8", "int8"], ["encode"])},
    ("seedvr2-tiny", "fp16", "decode encode"): TINY,
    ("seedvr2-tiny switched", "fp16", "decode"): ((3, 10, 13),),
    ("seedvr2-small", "fp16", "decode encode"): ((6, 48, 64), (5, 8, 8)),
    **{key: TINY for key in product(["wan2.1-tiny", "wan2.2-tiny"], ["bf16"], ["decode encode"])},
    **{key: ((7, 37, 21), (2, 128, 128))
       for key in product(["svd-tiny"], ["bf16", "fp16", "fp8", "int8"], ["decode encode"])},
    **{key: LARGE for key in product(["seedvr2"], ["fp16", "fp8", "int8"], HALVES)},
    ("seedvr2", "bf16", "decode encode"): ((6, 48, 64),),
    **{key: ((3, 6, 7),) for key in product(["seedvr2-8-bit"], ["fp16", "fp8", "int8"], ["decode encode"])},
    **{key: SMALL for key in product(["wan2.1", "wan2.2"], ["bf16", "fp8", "int8"], HALVES)},
    ("ltx", "bf16", "decode"): ((6, 7, 9),),
    ("mochi", "fp16", "decode"): ((4, 20, 24),),
    **{key: ((5, 14, 11),) for key in product(["hunyuanvideo"], ["bf16"], HALVES)},
    **{key: ((4, 14, 11),) for key in product(["cogvideox"], ["bf16", "fp8", "int8"], HALVES)},
    **{key: ((4, 7, 6), (2, 45, 80)) for key in product(["hunyuanvideo1.5"], ["fp16"], HALVES)},
    **{key: ((3, 37, 21), (1, 256, 256)) for key in product(["flux"], ["bf16"], HALVES)},
    **{key: ((3, 37, 21),) for key in product(["flux"], ["fp16", "fp8", "int8"], HALVES)},
    **{key: ((3, 37, 21),) for key in product(["qwenimage2.1"], ["bf16"], HALVES)},
    **{key: ((1, 37, 21),) for key in product(["mage"], ["bf16", "fp16", "fp8", "int8"], ["decode encode"])},
    **{key: ((4, 37, 27),) for key in product(["seedvr2-128 winograd"], ["fp16", "fp8", "int8"], HALVES)},
    ("hunyuanvideo1.5-128 winograd", "fp16", "decode"): ((4, 7, 6),),
}


def main(name: str, precision: str, halves: str) -> None:
    from gpu_models import make

    model, _, form = name.partition(" ")
    vae = make(model, precision)
    forms = {"": [DEFAULTS], "winograd": [DEFAULTS.switched(on=["winograd"])],
             "switched": [DEFAULTS.switched(off=off) for off in SWITCHED]}  # fmt: skip
    for options in forms[form]:
        vae.options = options
        for half in halves.split():
            for i, size in enumerate(CELLS[name, precision, halves]):
                compiled(vae, half, size, everything=not i and form != "switched")


def compiled(vae, half: str, size: tuple[int, int, int], everything: bool) -> None:
    """Compile the kernels of this component; `everything`: in small steps, tiles, bands and with histories parked
    too. Kernels know if a plane is small, and nothing else of its size, so one size is enough for that."""
    from zerowaste_vae import PlanError

    latents, h, w = size
    if half == "decode":
        source, work, plan = torch.randn(1, vae.latent_channels, *size), vae.decode, vae.plan_decode
        outputs = ("float32", "uint8")
    elif vae.can_encode and vae.planner.walk.why_not("encoder") is None:
        shape = (vae.frames(latents), vae.spatial * h, vae.spatial * w, 3)
        source, work, plan = torch.randint(256, shape, dtype=torch.uint8), vae.encode, vae.plan_encode
        outputs = ("",)
    else:
        return
    for output in outputs:
        options = {"output": output} if output else {}
        work(source, **options)
        if everything and output and not vae.architecture.in_tiles:
            work(source, chunk=1, **options)
            work(source, tiling="blended", tile=96, overlap=32, **options)
    if not everything or vae.architecture.in_tiles:
        return
    peak = plan(*size).peak_bytes / 2**30
    for share in (0.8, 0.6):  # in bands, or with histories parked
        try:
            work(source, vram_gb=share * peak, ram_gb=8, tiling="untiled")
        except PlanError:
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
