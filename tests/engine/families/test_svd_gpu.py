"""Stable Video Diffusion's VAE on a real GPU: bits in every band and group of frames, rounding beside plain torch, and
memory as it is stated."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.network import chain
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.runtime.parking import Parking

from ..gpu_models import decibels, make, plain_torch, reserved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("svd-tiny",)
#: Positions that go through together between the blocks in time, and the parking of a plan.
PLACEMENTS = [
    (1 << 40, None), (1, None), (1 << 18, None), (1, Parking(None, 0)), (1, Parking(None, 64 << 20)),
    (1, Parking(None, 0, rows=96)),
]  # fmt: skip


@pytest.fixture(scope="module", params=["bf16", "fp16", "fp8", "int8"])
def vae(request):
    made = make("svd-tiny", request.param)
    if made.precision != request.param:
        pytest.skip(f"{request.param} does not run on {torch.cuda.get_device_name()}")
    return made


def test_bands_and_groups_have_the_same_bits(vae, noise, monkeypatch):
    """Every band and group of frames has the same bits."""
    z = noise(1, 4, 7, 37, 21)
    assert vae.fused() is not None
    frames, plain = vae.decode(z), vae.planner.plan
    for group, parking in PLACEMENTS:
        KEPT.release()  # memory made for another size of groups
        monkeypatch.setattr(chain, "GROUP", group)
        monkeypatch.setattr(vae.planner, "plan", lambda *a, p=parking, **k: replace(plain(*a, **k), parking=p))
        assert torch.equal(vae.decode(z), frames), (group, parking)
    monkeypatch.undo()
    KEPT.release()
    assert torch.equal(vae.decode(z, chunk=2), frames)
    assert torch.equal(vae.decode(z, start=2, frames=3), frames[:, 2:5])
    assert torch.equal(torch.cat(list(vae.stream(z)), 1), frames)


def test_encodes_have_the_same_bits(vae, noise):
    video = (noise(5, 37 * 8 + 5, 21 * 8 + 3, 3) * 50 + 128).clamp(0, 255).byte()
    latent = vae.encode(video)
    assert torch.equal(vae.encode(video, chunk=2), latent)
    assert torch.equal(torch.cat(list(vae.encode_stream(video)), 2), latent)


def test_rounding_is_no_worse_than_plain_torchs(vae, noise):
    if vae.precision not in ("bf16", "fp16"):
        pytest.skip("8 bit has its own floor")
    z = noise(1, 4, 5, 24, 20)
    exact = make("svd-tiny", "fp32").decode(z)
    fused = decibels(vae.decode(z), exact)
    with plain_torch(vae):
        plain = decibels(vae.decode(z), exact)
    assert fused > plain - 0.5


def test_plans_take_what_they_state(noise):
    """A roomy plan, and the leanest of whole frames, with equal bits."""
    others = reserved()
    vae = make("svd-tiny", "bf16")
    z = noise(1, 4, 14, 128, 128)
    vae.decode(z[..., :8, :8])
    plan, made = vae.plan_decode(14, 128, 128), []
    lean = vae.plan_decode(14, 128, 128, vram_gb=0.75 * plan.peak_bytes / 2**30)
    assert not lean.tiled and lean.parking is not None
    for one, limit in ((plan, None), (lean, lean.peak_bytes / 2**30 + 0.01)):
        reserved()
        made.append(vae.decode(z, vram_gb=limit))
        assert 0.9 * one.peak_bytes < torch.cuda.max_memory_reserved() - others < 1.02 * one.peak_bytes
    assert torch.equal(*made)
