"""Wan at its published widths on a real GPU: bits in every chunking and placement, and rounding beside plain torch."""

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
WARM = ("wan2.1", "wan2.2")

VERSIONS = ("2.1", "2.2")
#: Latents of the clip whose rounding is looked at.
CLIP = (3, 20, 24)


@pytest.fixture(scope="module", params=[(v, p) for v in VERSIONS for p in ("bf16", "fp8", "int8")], ids="-".join)
def pair(request):
    """(version, its VAE in bf16 or 8 bit)"""
    version, precision = request.param
    vae = make(f"wan{version}", precision)
    if vae.precision != precision:
        pytest.skip(f"{precision} does not run on {torch.cuda.get_device_name()}")
    return version, vae


@pytest.fixture(scope="module")
def references():
    """references(version, z): (frames in fp32, dB of the fused bf16 against them), made once for each version."""
    known = {}

    def get(version, z):
        if version not in known:
            exact = make(f"wan{version}", "fp32").decode(z)
            known[version] = exact, decibels(make(f"wan{version}", "bf16").decode(z), exact)
        return known[version]

    return get


PLACEMENTS = [
    (Steps(1, 1), None), (Steps(2, 3), None), (Steps(1, 1), Parking(None, 0)),
    (Steps(2, 2), Parking(None, 64 << 20, buffers=3)),
]  # fmt: skip


def test_equal_bits(pair, noise, monkeypatch):
    """Every chunking and placement has the same bits."""
    _, vae = pair
    z = noise(1, vae.latent_channels, 3, 21, 13)
    video = (noise(9, 21 * vae.spatial + 5, 13 * vae.spatial + 3, 3) * 50 + 128).clamp(0, 255).byte()
    assert vae.fused() is not None
    frames, latent = vae.decode(z), vae.encode(video)  # in 8 bit other tests' clips may have widened the ranges
    plain = vae.planner.plan
    for steps, parking in PLACEMENTS:
        other = {"steps": steps, "parking": parking}
        monkeypatch.setattr(vae.planner, "plan", lambda *a, o=other, **k: replace(plain(*a, **k), **o))
        assert torch.equal(vae.decode(z), frames), other
        assert torch.equal(vae.encode(video), latent), other


def test_rounding_is_no_worse_than_plain_torchs(pair, noise, references):
    version, vae = pair
    z = noise(1, vae.latent_channels, *CLIP)
    exact, bf16 = references(version, z)
    fused = decibels(vae.decode(z), exact)
    if vae.precision != "bf16":
        assert vae.last_report.operands.startswith(f"31 of 31 convolutions in {vae.precision}")
        assert 20 < fused < bf16
        return
    with plain_torch(vae):
        plain = decibels(vae.decode(z), exact)
    assert fused == bf16  # of another VAE, from the same weights
    assert fused > plain - 0.5
