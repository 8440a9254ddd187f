"""Rows of frames on several ranks, for which threads stand in: the bits of one."""

import queue
import threading

import pytest
import torch
from zerowaste_vae.engine.archs.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.kernels.conv3d import reference
from zerowaste_vae.engine.network.fused import FusedDecoder
from zerowaste_vae.engine.run.rows import Rows, Split, splits

CPU = torch.device("cpu")


class Threads:
    """Peers within one process. boxes: by (from, to)."""

    def __init__(self, rank, count, boxes):
        self.rank, self.count, self.boxes, self.told = rank, count, boxes, 0

    def exchange(self, given, wanted):
        self.told += 1
        for peer, tensor in given.items():
            self.boxes[self.rank, peer].put(tensor.clone())
        for peer, tensor in wanted.items():
            got = self.boxes[peer, self.rank].get(timeout=60)
            assert got.shape == tensor.shape and got.dtype == tensor.dtype
            tensor.copy_(got)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Sums whose order is not seen: torch's convolutions on a CPU choose theirs by the size of the whole."""
    convolve = torch.nn.functional.conv3d
    monkeypatch.setattr(
        reference.F, "conv3d", lambda x, w, *a, **k: convolve(x.double(), w.double(), *a, **k)
    )


def decode(fused, z, chunk, frames, rows=None):
    run = fused.plan(min(chunk, z.shape[1]), *z.shape[2:], frames, torch.float32, CPU, rows=rows)
    stated = run.nbytes
    run.allocate()
    assert run.nbytes == stated
    out = []
    for part in z.permute(1, 2, 3, 0).split(chunk):
        fused.chunk(run, part, frames, torch.float32, lambda pixels: out.append(pixels.clone()))
    return torch.cat(out), stated


def shared(fused, z, chunk, frames, count):
    boxes = {(a, b): queue.Queue() for a in range(count) for b in range(count)}
    parts, errors = [None] * count, []

    def work(rank):
        try:
            with torch.no_grad():
                peers = Threads(rank, count, boxes)
                rows = Rows(peers, splits(z.shape[2], fused.scales(), count))
                parts[rank] = decode(fused, z, chunk, frames, rows), peers.told
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return torch.cat([out for (out, _), _ in parts], 1), [(size, told) for (_, size), told in parts]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count, h, w", [(2, 35, 3), (2, 67, 2), (3, 50, 1)])
def test_decoder(noise, seed_model, count, h, w, dtype):
    model = ARCHITECTURE.build(Config(None, (8, 16, 16, 16), 16, 4)).requires_grad_(False)
    seed_model(model, 3)
    fused, z = FusedDecoder(model.decoder.to(dtype), dtype), noise(16, 3, h, w)
    whole, size = decode(fused, z, 2, 0)
    found, ranks = shared(fused, z, 2, 0, count)
    assert found.shape == whole.shape
    assert torch.equal(found, whole)
    assert all(own < size and told > 0 for own, told in ranks)


def test_splits_begin_with_blocks():
    assert Split.of(180, 2).edges == (0, 64, 180) and Split.of(360, 2).edges == (0, 192, 360)
    assert Split.of(180, 2, 2).edges == (0, 96, 180) and Split.of(180, 2, 2).blocks(1) == (64, 180)
    assert Split.of(90, 2).edges == (0, 64, 90) and Split.of(64, 2).whole
