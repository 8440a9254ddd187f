"""Flux's and Qwen-Image 2.1's VAEs at their published widths on a real GPU: bits in every batch, band and placement,
rounding beside plain torch."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.runtime.parking import Parking

from ..gpu_models import decibels, make, plain_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("flux", "qwenimage2.1")
PLACEMENTS = [
    (Steps(1, 0), None), (Steps(3, 0), None), (Steps(1, 0), Parking(None, 0)), (Steps(2, 0), Parking(None, 64 << 20)),
    (Steps(1, 0), Parking(None, 0, streams=0)),
]  # fmt: skip


@pytest.fixture(scope="module", params=[
    ("flux", "bf16"), ("flux", "fp16"), ("flux", "fp8"), ("flux", "int8"), ("qwenimage2.1", "bf16"),
])  # fmt: skip
def vae(request):
    name, precision = request.param
    made = make(name, precision)
    if made.precision != precision:
        pytest.skip(f"{precision} does not run on {torch.cuda.get_device_name()}")
    return made


def test_every_batch_and_band_has_the_same_bits(vae, noise, monkeypatch):
    z = noise(3, vae.latent_channels, 1, 37, 21)
    s = vae.spatial
    pictures = (noise(3, 37 * s + 5, 21 * s + 3, vae.colours[0]) * 50 + 128).clamp(0, 255).byte()
    assert vae.fused() is not None
    frames, latent = vae.decode(z), vae.encode(pictures)
    plain = vae.planner.plan
    for steps, parking in PLACEMENTS:
        other = {"steps": steps, "parking": parking}
        monkeypatch.setattr(vae.planner, "plan", lambda *a, o=other, **k: replace(plain(*a, **k), **o))
        assert torch.equal(vae.decode(z), frames), other
        assert torch.equal(vae.encode(pictures), latent), other
    monkeypatch.undo()
    if vae.precision in ("bf16", "fp16"):  # ranges of 8 bit are a batch's own where a file is not calibrated
        assert torch.equal(vae.decode(z[1:2]), frames[1:2])
        assert torch.equal(vae.encode(pictures[1:2]), latent[1:2])


def test_rounding_is_no_worse_than_plain_torchs(vae, noise):
    if vae.precision not in ("bf16", "fp16"):
        pytest.skip("8 bit has its own floor")
    z = noise(1, vae.latent_channels, 1, 48, 40)
    exact = make(vae.arch, "fp32").decode(z)
    fused = decibels(vae.decode(z), exact)
    with plain_torch(vae):
        plain = decibels(vae.decode(z), exact)
    assert fused > plain - 0.5
