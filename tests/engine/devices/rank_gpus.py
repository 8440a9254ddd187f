"""Run under torchrun on GPUs, with pairs of MODEL PRECISION: clips by rows and by segments. Rank 0 prints, as JSON, how
each result was shared and whether it has the bits of one GPU. With "failing" before them rank 1 fails instead."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from gpu_models import make
from zerowaste_vae.engine.devices.ranks import joined
from zerowaste_vae.engine.planning import shares
from zerowaste_vae.engine.run.rows import RowRun

#: Latents [T, h, w]: odd rows and columns, whose parts are not alike.
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
            for split in ("rows", "segments"):
                made = call(given, chunk=1, devices=replace(ranks, split=split))
                if one is not None:
                    report = vae.last_report
                    by = "rows" if "rows of every frame" in report.plan else f"{len(report.parts)} segments"
                    case = model, vae.precision, call.__name__, split, f"{frame[1]}x{frame[0]}"
                    out.append((" ".join(case), by, torch.equal(made, one)))
    vae.release()
    return out


def failing(ranks, model, precision):
    """In the middle of its rows, while rank 0's device waits for them."""
    vae, edges, calls = make(model, precision), RowRun.edges, []

    def fail(self, *rest):
        calls.append(rest)
        if ranks.rank and not self.dry and len(calls) > 100:
            raise ValueError("provoked")
        edges(self, *rest)

    RowRun.edges = fail
    vae.decode(torch.zeros(1, vae.latent_channels, 9, *SIZES[0][1:]), chunk=1, devices=replace(ranks, split="rows"))


def main(*models):
    each = failing if models[0] == "failing" else cases
    shares.Leads.__call__ = lambda self, first: 0.1 * bool(first)  # clips too short to gain are shared, too
    found = []
    with joined() as ranks:
        torch.cuda.set_device(ranks.device)
        for model, precision in zip(*[iter(models[each is failing :])] * 2, strict=True):
            found += each(ranks, model, precision)
        if ranks.rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
