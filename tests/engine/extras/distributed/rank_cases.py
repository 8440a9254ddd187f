"""Run under torchrun, with a VAE file and a folder: what ranks do together; rank 0 prints what came of it as JSON."""

from __future__ import annotations

import json
import sys
import threading

import torch
from zerowaste_vae import Cancelled, load
from zerowaste_vae.engine.execution import call, core, results
from zerowaste_vae.engine.extras.distributed import ranks as ranks_
from zerowaste_vae.engine.extras.distributed import shares
from zerowaste_vae.engine.extras.distributed.ranks import joined

made = call.decode


def failing(vae, z, request, tick, results, wanted, *rest):
    """Behind the first frames."""
    yield from made(vae, z, request, tick, results, range(wanted.start, wanted.start + 3), *rest)
    raise RuntimeError("CUDA error: lost")


def stream(vae, z, **options):
    return torch.cat([*vae.stream(z, chunk=1, **options), torch.empty(1, 0, 8, 16, 3)], 1)


def cases(ranks, vae):
    z = torch.randn(1, 16, 12, 1, 2, generator=torch.Generator().manual_seed(1))
    whole, out = vae.decode(z, chunk=1), {}
    found = stream(vae, z, devices=ranks)
    if ranks.rank == 0:
        out["stream"] = torch.equal(found, whole), len(vae.last_report.parts), vae.last_report.complete
    call.decode = failing if ranks.rank else made
    found = stream(vae, z, devices=ranks)
    call.decode = made
    if ranks.rank == 0:
        out["failed"] = torch.equal(found, whole), vae.last_report.events["handed_over"]
    kind_of, seconds, rank = ranks_.kind_of, ranks_.seconds, ranks.rank
    ranks_.kind_of, ranks_.seconds = lambda _: f"kind {rank}", lambda _: 1.0 + 2 * rank
    found = vae.decode(z, chunk=1, devices=ranks, mixed_devices=True)
    ranks_.kind_of, ranks_.seconds = kind_of, seconds
    if rank == 0:
        first, second = (len(made) for made, _ in vae.last_report.parts)
        out["unequal"] = torch.equal(found, whole), first / second
    told = []
    cancel = (lambda: bool(told)) if ranks.rank == 0 else None
    try:
        stream(vae, z, devices=ranks, progress=lambda *at: told.append(at), cancel=cancel)
    except Cancelled:
        out["cancelled"] = True
    dropped = vae.stream(z, chunk=1, devices=ranks)
    next(dropped, None)  # on rank 1 there is none
    dropped.close()
    batch = torch.cat([z, -z])[:, :, :5]
    found = vae.decode(batch, chunk=1, devices=ranks)
    latent = vae.encode(whole, chunk=1, devices=ranks)
    pieces = [*vae.encode_stream(iter(whole[0]), chunk=1, count=whole.shape[1], devices=ranks), latent[:, :, :0]]
    if ranks.rank == 0:
        out["decode"] = torch.equal(found, vae.decode(batch, chunk=1))
        out["encode"] = torch.equal(latent, vae.encode(whole, chunk=1))
        out["encode_stream"] = len(pieces) > 3 and torch.equal(latent, torch.cat(pieces, 2))
    return out


def main(path):
    torch.set_num_threads(1)
    core.why_off = lambda *_: "off"
    shares.Leads.__call__ = lambda self, first: 0.1 * bool(first)
    results.waiting_room = lambda ram_gb: 2 * 4 * 3 * (8 * 16 * 3 * 4)  # two latents of each
    with joined() as ranks:
        out, rank = cases(ranks, load(path, device="cpu")), ranks.rank
    if rank == 0:
        out["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("zerowaste")]
        print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
