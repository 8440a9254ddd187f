"""Reduced VAEs on a real GPU: pruned blocks and other tiles have the bits of what they stand for, tiny VAEs and widths
that no kernel takes run in plain torch."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae import Checkpoint, load
from zerowaste_vae.engine import log
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import minimax_h3, taehv, wan

from ...conftest import FIXTURES
from ..gpu_models import decibels
from .test_minimax_h3_reduced import in_pruned
from .test_wan_reduced import PRUNED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ()
WIDTHS = (32, 32, 64, 64)


def on_gpu(tensors, precision, metadata=None):
    return load(Checkpoint(dict(tensors), metadata or {}), precision, "cuda")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_pruned_blocks_of_wan_have_the_bits_of_blocks_that_add_nothing(precision, noise):
    whole = random_checkpoint(wan.Config(WIDTHS, WIDTHS), architecture=wan.WAN21).tensors
    gone = tuple(f"{name}.residual." for name in PRUNED["wan2.1"])
    for name, tensor in whole.items():
        if name.startswith(gone) and ".residual.6." in name:
            tensor.zero_()
    left = on_gpu({n: t for n, t in whole.items() if not n.startswith(gone)}, precision)
    full = on_gpu(whole, precision)
    assert left.fused() is not None and len(left.model.config.pruned) == len(PRUNED["wan2.1"])
    z = noise(1, 16, 3, 21, 13)
    frames = left.decode(z)
    assert torch.equal(frames, full.decode(z)) and torch.equal(left.decode(z, chunk=1), frames)
    video = noise(9, 168, 104, 3).sigmoid()
    assert torch.equal(left.encode(video), full.encode(video))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_24_channels_run_in_plain_torch(precision, noise, caplog):
    log._said.clear()
    light = random_checkpoint(wan.WAN21.published.sizes("lightvaew2_1"), architecture=wan.WAN21).tensors
    vae, z = on_gpu(light, precision), noise(1, 16, 3, 20, 24)
    frames = vae.decode(z)
    assert vae.last_report.plan.startswith("plain torch") and "widths [24] are no multiples of 16" in caplog.text
    assert decibels(frames, on_gpu(light, "fp32").decode(z)) > (30 if precision == "bf16" else 45)


def test_a_pruned_encoder_of_h3(noise):
    """Of the published widths, in fp16, against fp32."""
    config = replace(minimax_h3.PUBLISHED, layers=1)
    tensors = random_checkpoint(config, architecture=minimax_h3.ARCHITECTURE).tensors
    left = {n: t for n, t in tensors.items() if not in_pruned(n)}
    video = noise(22, 272, 304, 3).sigmoid()
    latents = {precision: on_gpu(left, precision).encode(video) for precision in ("fp16", "fp32")}
    error = (latents["fp16"] - latents["fp32"]).square().mean() / latents["fp32"].square().mean()
    assert -10 * error.log10() > 40


def test_lynnreals_tiles(noise, monkeypatch):
    """In batches of any size and with streamed layers they have the same bits; memory keeps to the plan."""
    tensors = random_checkpoint(minimax_h3.Config(None, 256, 26, 512), architecture=minimax_h3.ARCHITECTURE).tensors
    vae, z = on_gpu(tensors, "fp16"), noise(1, 24, 7, 36, 48)
    peak, plain = vae.plan_decode(7, 36, 48, native_tiles="trained").peak_bytes, vae.planner.plan
    torch.cuda.reset_peak_memory_stats()
    frames = vae.decode(z, native_tiles="trained")
    assert torch.cuda.max_memory_allocated() <= peak
    assert "4 x 3 tiles" in vae.last_report.plan and "as it was trained" in vae.last_report.plan
    for tiles, resident in ((1, 26), (5, 26), (2, 3)):

        def plan(*a, tiles=tiles, resident=resident, **k):
            made = plain(*a, **k)
            return replace(made, own=replace(made.own, tiles=tiles, resident=resident))

        monkeypatch.setattr(vae.planner, "plan", plan)
        assert torch.equal(vae.decode(z, native_tiles="trained"), frames), (tiles, resident)
    monkeypatch.undo()
    assert decibels(frames, on_gpu(tensors, "fp32").decode(z, native_tiles="trained")) > 40


def test_trained_taef2_in_16_bit(noise):
    """Its decoder has no fused form; a batch of pictures has the bits of each alone."""
    halves = {h: load_file(FIXTURES / "taef2" / f"taef2_{h}.safetensors") for h in ("encoder", "decoder")}
    tensors = {f"{half}.{n}": t for half, names in halves.items() for n, t in names.items()}
    pictures = torch.nn.functional.interpolate(noise(2, 3, 12, 16), (384, 512), mode="bicubic")
    pictures = pictures.sigmoid().permute(0, 2, 3, 1)
    exact = on_gpu(tensors, "fp32")
    z = exact.encode(pictures)
    frames = exact.decode(z)
    for precision, least in (("fp16", 50), ("bf16", 32)):
        vae = on_gpu(tensors, precision)
        made = vae.decode(z)
        assert decibels(made, frames) > least, precision
        assert torch.equal(vae.decode(z[1:]), made[1:])


@pytest.mark.parametrize("file", ["taew2_1", "taew2_2_super", "lighttaehy1_5", "taeh3", "taeltx2_3"])
def test_tiny_vaes_of_video_in_16_bit(file, noise):
    """Of published widths, near fp32; chunks and parts have the bits of the whole clip, within what is stated."""
    config = taehv.ARCHITECTURE.published.sizes(file)
    tensors = random_checkpoint(config, architecture=taehv.ARCHITECTURE).tensors
    vae, z = on_gpu(tensors, "fp16"), noise(1, config.latent_channels, 12, 15, 26)
    peak = vae.plan_decode(12, 15, 26).peak_bytes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    frames = vae.decode(z)
    assert torch.cuda.max_memory_allocated() <= peak
    count = frames.shape[1]
    assert torch.equal(vae.decode(z, chunk=1), frames) and torch.equal(vae.decode(z, chunk=5), frames)
    assert torch.equal(vae.decode(z, start=count - 4, frames=4), frames[:, -4:])
    exact = on_gpu(tensors, "fp32")
    assert decibels(frames, exact.decode(z)) > 45
    video = frames[:, : vae.architecture.filled(20)]
    latent = vae.encode(video)
    assert torch.equal(vae.encode(video, chunk=2), latent)
    error = (latent - exact.encode(video)).square().mean() / latent.square().mean()
    assert -10 * error.log10() > 45
