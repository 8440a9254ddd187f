"""Run under torchrun, with VAE files: rows of every frame on each rank; rank 0 prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace

import torch
from zerowaste_vae import Cancelled, load
from zerowaste_vae.engine import core
from zerowaste_vae.engine.devices import by_rows
from zerowaste_vae.engine.devices.ranks import joined
from zerowaste_vae.engine.kernels.conv3d import reference
from zerowaste_vae.engine.network.fused import FusedDecoder
from zerowaste_vae.engine.run.rows import RowRun

convolve = torch.nn.functional.conv3d


def cases(ranks, path, precision, height):
    vae, out = load(path, precision=precision, device="cpu"), {}
    z = torch.randn(1, 16, 3, height, 1 + vae.can_encode, generator=torch.Generator().manual_seed(1))
    whole = vae.decode(z, chunk=1) if ranks.rank == 0 else None
    found = vae.decode(z, chunk=1, devices=ranks)
    if ranks.rank == 0:
        out["decode"] = torch.equal(found, whole)
        out["plan"], out["peak"], out["operands"] = (
            vae.last_report.plan, vae.last_report.predicted_gb, vae.last_report.operands)  # fmt: skip
    pieces = [*vae.stream(z, chunk=1, devices=ranks, start=2, frames=5, output="uint8")]
    if ranks.rank == 0:
        part = vae.decode(z, chunk=1, start=2, frames=5, output="uint8")
        out["stream"] = torch.equal(torch.cat(pieces, 1), part) and len(pieces) > 1
    if vae.can_encode:
        video = torch.rand(1, 9, 8 * height, 16, 3, generator=torch.Generator().manual_seed(2))
        latent = vae.encode(video, chunk=1, devices=ranks)
        if ranks.rank == 0:
            out["encode"] = vae.last_report.plan, torch.equal(latent, vae.encode(video, chunk=1))
    told = []
    try:
        vae.decode(z, chunk=1, devices=ranks, progress=lambda *at: told.append(at), cancel=lambda: bool(told))
    except Cancelled:
        out["cancelled"] = True
    try:  # while rank 0 plans whether rows fit, and the others wait
        vae.decode(z, devices=replace(ranks, split="auto"), cancel=lambda: True)
    except Cancelled:
        out["stopped"] = True
    dropped = vae.stream(z, chunk=1, devices=ranks)
    next(dropped, None)
    dropped.close()
    return out


def failing(ranks, path, who):
    """A rank runs out of memory in the middle of its third chunk; on rank 0 what came of it, and of the next call."""
    vae, edges, chunk, chunks = load(path, device="cpu"), RowRun.edges, FusedDecoder.chunk, []
    z = torch.randn(1, 16, 6, 33, 1, generator=torch.Generator().manual_seed(1))

    def count(self, run, *rest, **options):
        chunks.extend([0] * (not run.dry))
        chunk(self, run, *rest, **options)

    def fail(self, *rest):
        if ranks.rank == who and len(chunks) == 3:
            chunks[-1] += 1
            if chunks[-1] == 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
        edges(self, *rest)

    def frames():
        return torch.cat([*vae.stream(z, chunk=1, devices=ranks), torch.empty(1, 0, 264, 8, 3)], 1)

    FusedDecoder.chunk, RowRun.edges = count, fail
    found = frames()
    FusedDecoder.chunk, RowRun.edges = chunk, edges
    events, again = vae.last_report.events["handed_over"], frames()
    if ranks.rank:
        return None
    plan, whole = vae.last_report.plan, vae.decode(z, chunk=1)
    return torch.equal(found, whole), torch.equal(again, whole), events, plan


def main(*files):
    torch.set_num_threads(1)
    core.why_off = lambda *_: None
    by_rows.sooner = lambda *_: True
    # Sums whose order is not seen: torch's convolutions on a CPU choose theirs by the size of the whole.
    reference.F.conv3d = lambda x, w, *a, **k: convolve(x.double(), w.bfloat16().double(), *a, **k)
    with joined() as ranks:
        ranks = replace(ranks, split="rows")
        out = [cases(ranks, path, precision, int(height))
               for path, precision, height in zip(*[iter(files)] * 3, strict=True)]  # fmt: skip
        failed = [failing(ranks, files[0], who) for who in (1, 0)]
        if ranks.rank == 0:
            print(json.dumps(out), flush=True)
            print(json.dumps({"failed": failed}), flush=True)
        ranks.gather(None)  # rank 0 has printed
        vae = load(files[0], device="cpu")
        pieces = vae.stream(torch.zeros(1, 16, 8, 33, 1), chunk=1, devices=ranks)
        next(pieces, None) if ranks.rank == 0 else ended_behind(0.5)
        for _ in pieces:
            pass


def ended_behind(seconds):
    """As if it were killed, while it makes its rows."""
    threading.Timer(seconds, os._exit, (9,)).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
