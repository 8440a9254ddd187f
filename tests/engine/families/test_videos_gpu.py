"""LTX, Mochi, HunyuanVideo and CogVideoX at their published widths on a real GPU: bits in every chunking and
placement, and rounding beside plain torch."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.planning.plan import why_none
from zerowaste_vae.engine.runtime.parking import Parking

from ..gpu_models import decibels, make, plain_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("ltx", "mochi", "hunyuanvideo", "hunyuanvideo1.5", "cogvideox")
#: Family -> its type of 16 bit, and latents [T, h, w] of a clip.
FAMILIES = {
    "ltx": ("bf16", (6, 7, 9)), "mochi": ("fp16", (4, 20, 24)),
    "hunyuanvideo": ("bf16", (5, 14, 11)), "hunyuanvideo1.5": ("fp16", (4, 7, 6)),
    "cogvideox": ("bf16", (4, 14, 11)),
}  # fmt: skip
PLACEMENTS = [
    (Steps(1, 1), None), (Steps(2, 3), None), (Steps(3, 16), None), (Steps(1, 1), Parking(None, 0)),
    (Steps(2, 8), Parking(None, 64 << 20, buffers=3)), (Steps(2, 2), Parking(None, 0)), (Steps(2, 8), None),
    (Steps(2, 16), None),
]  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, latents):
    """(VAE, latents)"""
    precision, size = FAMILIES[request.param]
    vae = make(request.param, precision)
    return vae, latents(request.param, vae.latent_channels, size)


@pytest.fixture(scope="module")
def latents():
    return lambda name, channels, size: torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(1))


def test_equal_bits(pair, monkeypatch):
    """The end of a clip, whose frames come late, included; and more calls, where graphs replay them."""
    vae, z = pair
    assert vae.fused() is not None and vae.planner.walk.why_not("decoder") is None
    frames, plain = vae.decode(z), vae.planner.plan
    fixed = vae.model.decoder.program.fixed(z.shape[2])  # its norms take frames of that together
    for steps, parking in PLACEMENTS:
        other = {"steps": fixed or steps, "parking": parking}
        monkeypatch.setattr(vae.planner, "plan", lambda *a, o=other, **k: replace(plain(*a, **k), **o))
        for _ in range(3 if why_none(True, vae.plan_decode(*z.shape[2:]), vae.temporal) is None else 1):
            assert torch.equal(vae.decode(z), frames), other


def test_plans_are_kept(pair):
    """By weights that are packed: what that takes in fp32 is more than so short a clip."""
    vae, z = pair
    size = z.shape[2:]
    plan = vae.plan_decode(*size)
    vae._fused.pack("decoder")
    torch.cuda.reset_peak_memory_stats()
    vae.decode(z)
    assert torch.cuda.max_memory_allocated() <= plan.peak_bytes


def test_equal_bits_encode(pair):
    """Encodes have the same bits in every chunking."""
    vae, _ = pair
    if not vae.can_encode or vae.planner.walk.why_not("encoder"):
        pytest.skip("its encoder runs as plain torch, or its file here has none")
    clip = torch.rand(13, 112, 96, 3, generator=torch.Generator().manual_seed(2))
    latent = vae.encode(clip)
    for chunk in (1, 2, 3):
        assert torch.equal(vae.encode(clip, chunk=chunk), latent), chunk


def test_pieces_that_graphs_replay(pair):
    """A clip that begins with one frame, whose history goes, and pieces of one kind behind it."""
    vae, _ = pair
    if not vae.model.encoder or not vae.model.encoder.program.piece:
        pytest.skip("its chunks are no part of the model")
    clip = torch.rand(33, 112, 96, 3, generator=torch.Generator().manual_seed(2))
    latent = vae.with_options(vae.options.switched(off=["cuda_graphs"])).encode(clip)
    for _ in range(3):
        assert torch.equal(vae.encode(clip), latent)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_conditioned_norms_in_8_bit(latents, precision):
    """Whole and in bands, and close to what fp32 gives."""
    vae = make("cogvideox", precision)
    z = latents("cogvideox", 16, (4, 14, 11))
    frames = vae.decode(z)
    assert precision in vae.last_report.operands
    assert torch.equal(vae.decode(z, tiling="exact", tile=32), frames) and vae.last_report.parked_gb > 0
    assert decibels(frames, make("cogvideox", "fp32").decode(z)) > 25


def test_rounding_is_no_worse_than_plain_torchs(pair, request):
    vae, z = pair
    exact = make(vae.arch, "fp32").decode(z)
    fused = decibels(vae.decode(z), exact)
    with plain_torch(vae):
        plain = decibels(vae.decode(z), exact)
    assert fused > plain - 0.5
