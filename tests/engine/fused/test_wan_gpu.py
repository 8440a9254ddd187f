"""Wan at its published widths on a real GPU: bits in every chunking and placement, and rounding beside plain torch."""

import math
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.archs import wan
from zerowaste_vae.engine.fused.parking import Parking
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


def make(version, precision):
    """Seeded weights under which activations stay of order one; the same values, rounded to bf16, in every type."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    config, architecture = MODELS[version]
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("meta"):
        model = wan.WAN21.build(config)
    weights = {}
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator, device="cuda")
        gain = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
        weights[name] = (1 + 0.2 * noise if name.endswith("gamma") else noise * gain).bfloat16().to(dtype)
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(False)
    name = "fp32" if precision == "fp32" else "bf16"
    return VideoVAE(model, architecture, name, dtype, torch.device("cuda"), None, precision)


@pytest.fixture(scope="module", params=[(v, p) for v in MODELS for p in ("bf16", "fp8", "int8")], ids="-".join)
def pair(request):
    """(version, its VAE in bf16 or 8 bit)"""
    version, precision = request.param
    vae = make(version, precision)
    if vae.precision != precision:
        pytest.skip(f"{precision} does not run on {torch.cuda.get_device_name()}")
    yield version, vae
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


def decibels(frames, exact):
    return 10 * math.log10(1 / (frames.double() - exact.double()).square().mean().item())


def test_rounding_is_no_worse_than_plain_torchs(pair, noise):
    version, vae = pair
    z = noise(1, vae.latent_channels, 3, 20, 24)
    exact = make(version, "fp32").decode(z)
    fused = decibels(vae.decode(z), exact)
    if vae.precision != "bf16":
        assert vae.last_report.operands.startswith(f"31 of 31 convolutions in {vae.precision}")
        assert 20 < fused < decibels(make(version, "bf16").decode(z), exact)
        return
    vae.triton_fusion = False
    try:
        plain = decibels(vae.decode(z), exact)
    finally:
        vae.triton_fusion = True
    assert fused > plain - 0.5
