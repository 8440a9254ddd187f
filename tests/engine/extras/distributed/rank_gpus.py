"""Run under torchrun on GPUs, with pairs of MODEL PRECISION: clips by segments. Rank 0 prints, as JSON, how each result
was shared and whether it has the bits of one GPU."""

from __future__ import annotations

import json
import sys

import torch
from gpu_models import make
from zerowaste_vae.engine.extras.distributed import shares
from zerowaste_vae.engine.extras.distributed.ranks import joined

#: Latents [T, h, w]: odd rows and columns.
SIZES = (5, 37, 21), (4, 33, 13)


def cases(ranks, model, precision):
    vae, out = make(model, precision), []
    for size in SIZES:
        t, *frame = size
        z = torch.randn(1, vae.latent_channels, *size, generator=torch.Generator().manual_seed(1))
        pixels = vae.frames(t), *(vae.spatial * n for n in frame), 3
        video = torch.rand(1, *pixels, generator=torch.Generator().manual_seed(2))
        for call, given in ((vae.decode, z), (vae.encode, video)):
            one = call(given, chunk=1) if ranks.rank == 0 else None
            made = call(given, chunk=1, devices=ranks)
            if one is not None:
                case = model, vae.precision, call.__name__, f"{frame[1]}x{frame[0]}"
                out.append((" ".join(case), len(vae.last_report.parts), torch.equal(made, one)))
    vae.release()
    return out


def main(*models):
    shares.Leads.__call__ = lambda self, first: 0.1 * bool(first)  # clips too short to gain are shared, too
    found = []
    with joined() as ranks:
        torch.cuda.set_device(ranks.device)
        for model, precision in zip(*[iter(models)] * 2, strict=True):
            found += cases(ranks, model, precision)
        if ranks.rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
