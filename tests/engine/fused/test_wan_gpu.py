"""Wan at its published widths on a real GPU: bits in every chunking and placement, and rounding beside plain torch."""

import math
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.fused.parking import Parking
from zerowaste_vae.engine.models import wan
from zerowaste_vae.engine.runtime.stream import Steps
from zerowaste_vae.engine.vae import VideoVAE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

MODELS = {
    "2.1": (wan.Config((96, 192, 384, 384), (96, 192, 384, 384)), wan.WAN21),
    "2.2": (wan.Config((160, 320, 640, 640), (256, 512, 1024, 1024), 48, 2), wan.WAN22),
}


def make(version, dtype):
    """Seeded weights under which activations stay of order one; the same values, rounded to bf16, in every type."""
    config, architecture = MODELS[version]
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("meta"):
        model = wan.Wan(config)
    weights = {}
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator, device="cuda")
        gain = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
        weights[name] = (1 + 0.2 * noise if name.endswith("gamma") else noise * gain).bfloat16().to(dtype)
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(False)
    return VideoVAE(model, architecture, str(dtype)[6:], dtype, torch.device("cuda"))


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def pair(request):
    """(version, bf16)"""
    yield request.param, make(request.param, torch.bfloat16)
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("steps", "parking"), [(Steps(1, 1), None), (Steps(2, 3), None), (Steps(1, 1), Parking(None, 0)),
                           (Steps(2, 2), Parking(None, 64 << 20, buffers=3))]
)  # fmt: skip
def test_every_chunking_and_placement_has_the_same_bits(pair, noise, monkeypatch, steps, parking):
    _, vae = pair
    z = noise(1, vae.latent_channels, 4, 21, 13)
    video = (noise(13, 21 * vae.spatial + 5, 13 * vae.spatial + 3, 3) * 50 + 128).clamp(0, 255).byte()
    assert vae.fused() is not None
    frames, latent = vae.decode(z), vae.encode(video)
    plain = vae.planner.plan
    monkeypatch.setattr(vae.planner, "plan", lambda *a, **o: replace(plain(*a, **o), steps=steps, parking=parking))
    assert torch.equal(vae.decode(z), frames)
    assert torch.equal(vae.encode(video), latent)


def test_rounding_is_no_worse_than_plain_torchs(pair, noise):
    version, vae = pair
    exact = make(version, torch.float32)
    z = noise(1, vae.latent_channels, 3, 20, 24)

    def decibels(frames):
        return 10 * math.log10(1 / (frames.double() - reference.double()).square().mean().item())

    reference = exact.decode(z)
    fused = decibels(vae.decode(z))
    vae.triton_fusion = False
    try:
        plain = decibels(vae.decode(z))
    finally:
        vae.triton_fusion = True
    assert fused > plain - 0.5
