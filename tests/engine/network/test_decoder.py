"""The fused decoder against the plain modules, through the reference operators, in every chunking."""

import pytest
import torch
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.network.fused import FusedDecoder


def fused_decode(fused, z, chunk, frames, output=torch.float32):
    """[C, T, h, w] -> [F, 8h, 8w, 3]"""
    run = fused.plan(min(chunk, z.shape[1]), *z.shape[2:], frames, output, torch.device("cpu"))
    stated = run.nbytes
    run.allocate()
    assert run.nbytes == stated
    out = []
    for part in z.permute(1, 2, 3, 0).split(chunk):
        fused.chunk(run, part, frames, output, lambda pixels: out.append(pixels.clone()))
    return torch.cat(out)


@pytest.fixture(scope="module")
def pair(seed_model):
    # 8 and 16 channels at the ends: the latent's own ring then coincides with the lowest stage's.
    models = {}
    for widths in ((8, 16, 16, 16), (8, 16, 32, 24)):
        model = ARCHITECTURE.build(Config(None, widths, 16, 4)).requires_grad_(False)
        seed_model(model, 3)
        models[widths] = model.decoder, FusedDecoder(model.decoder, torch.float32)
    return models


@pytest.mark.parametrize("widths", [(8, 16, 16, 16), (8, 16, 32, 24)])
@pytest.mark.parametrize(("chunk", "frames"), [(5, 0), (1, 0), (2, 0), (3, 2), (1, 1), (2, 3), (4, 5)])
@torch.no_grad()
def test_equals_plain_in_every_chunking(pair, noise, widths, chunk, frames, atol):
    plain, fused = pair[widths]
    z = noise(16, 5, 4, 5)
    expected = plain(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)
    torch.testing.assert_close(fused_decode(fused, z, chunk, frames), expected, rtol=0, atol=atol)


@torch.no_grad()
def test_bytes_and_one_frame(pair, noise):
    plain, fused = pair[8, 16, 32, 24]
    z = noise(16, 1, 3, 7, seed=1)
    expected = plain(z[None])[0].clamp(-1, 1).mul(127.5).add(127.5).permute(1, 2, 3, 0)
    out = fused_decode(fused, z, 1, 0, torch.uint8)
    assert out.dtype == torch.uint8
    assert (out.float() - expected).abs().max() <= 0.51


@torch.no_grad()
def test_memory_is_used_again_for_the_next_clip(pair, noise):
    _, fused = pair[8, 16, 16, 16]
    run = fused.plan(2, 3, 3, 0, torch.float32, torch.device("cpu"))
    run.allocate()

    def decode(z):
        out = []
        for part in z.permute(1, 2, 3, 0).split(2):
            fused.chunk(run, part, 0, torch.float32, lambda pixels: out.append(pixels.clone()))
        run.restart()
        return torch.cat(out)

    a, b = noise(16, 4, 3, 3), noise(16, 3, 3, 3, seed=1)
    first = decode(a)
    decode(b)
    assert torch.equal(decode(a), first)
