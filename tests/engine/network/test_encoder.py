"""The fused encoder against the plain modules, through the reference operators, in every chunking."""

import pytest
import torch
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.network.fused import FusedEncoder
from zerowaste_vae.engine.network.stream import frame_spans


@pytest.fixture(scope="module")
def pair(seed_model):
    model = ARCHITECTURE.build(Config((8, 16, 32, 24), None, 16, 4)).requires_grad_(False)
    seed_model(model, 3)
    return model.encoder, FusedEncoder(model.encoder, torch.float32)


@pytest.mark.parametrize(
    ("count", "height", "width", "chunk", "frames"),
    [(9, 24, 32, 0, 0), (9, 35, 29, 1, 1), (13, 16, 24, 2, 3), (1, 17, 40, 1, 0), (5, 19, 16, 1, 2)],
)
@torch.no_grad()
def test_equals_plain(pair, noise, count, height, width, chunk, frames, atol):
    plain, fused = pair
    x = noise(1, 3, count, height, width)
    latents = (count - 1) // 4 + 1
    run = fused.plan(min(chunk or latents, latents), height, width, frames, torch.device("cpu"))
    stated = run.nbytes
    run.allocate()
    assert run.nbytes == stated
    video = x[0].permute(1, 2, 3, 0)
    out = torch.cat([fused.chunk(run, video[a:b], frames).clone() for a, b in frame_spans(count, chunk, 4)])
    torch.testing.assert_close(out, plain(x)[0].permute(1, 2, 3, 0), rtol=0, atol=atol)
