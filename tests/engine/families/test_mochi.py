"""Mochi's VAE against recorded outputs of the original, in chunks, and on the fused operators."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import CheckpointError, load
from zerowaste_vae.engine.families import detect
from zerowaste_vae.engine.families.mochi import ARCHITECTURE, Config, Level
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.runtime.parking import Parking

from .originals import close
from .test_ltx import fused

#: Every kind of level, with few channels.
DECODER = (Level(32, 1), Level(32, 1, (3, 2, 2)), Level(24, 4, (2, 2, 2)), Level(16, 1, (1, 2, 2)), Level(8, 1))
ENCODER = (
    Level(32, 3), Level(32, 1, (1, 2, 2), True), Level(32, 1, (2, 2, 2), True), Level(64, 1, (3, 2, 2), True),
    Level(64, 1, None, True),
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(seed_model):
    model = ARCHITECTURE.build(Config(ENCODER, DECODER, norm_groups=8)).requires_grad_(False)
    seed_model(model, 5)
    return model


def test_decodes_are_the_originals(shared):
    folder = shared / "golden" / "other"
    vae, tensors = load(folder / "mochi.weights.safetensors", device="cpu"), load_file(folder / "mochi.io.safetensors")
    assert vae.arch == "mochi" and not vae.can_encode
    for count in (1, 2, 3):
        decoded = vae.decode_raw(tensors[f"T{count}.latent"], chunk=1, frames=2)
        close(decoded, tensors[f"T{count}.decode"])


@pytest.mark.parametrize(("precision", "least"), [("fp16", 50), ("bf16", 30)])
def test_waves_are_those_of_the_pixels(tiny, tmp_path, precision, least):
    """Not of rounded ones, whose waves are others: 27 and 10 dB."""
    save_file(tiny.state_dict(), tmp_path / "w.safetensors")
    exact, vae = (load(tmp_path / "w.safetensors", p, "cpu", norm_groups=8) for p in ("fp32", precision))
    video = torch.rand(1, 13, 16, 24, 3, generator=torch.Generator().manual_seed(0))
    for options in {}, {"chunk": 1}, {"tiling": "blended", "tile": 32, "overlap": 8}:
        expected = exact.encode(video, **options)
        error = (vae.encode(video, **options) - expected).square().mean() / expected.var()
        assert -10 * error.log10() > least, options


@torch.no_grad()
def test_every_chunking_is_the_whole_clip(tiny, tmp_path, noise):
    """Bit by bit, the encoder too, whose attention waits for the clip's end."""
    save_file(tiny.state_dict(), tmp_path / "w.safetensors")
    vae = load(tmp_path / "w.safetensors", device="cpu", norm_groups=8)
    assert vae.model.config == tiny.config
    z = noise(1, 12, 5, 2, 2)
    whole = vae.decode_raw(z)
    assert whole.shape == (1, 3, 25, 16, 16)
    assert torch.equal(vae.decode_raw(z, chunk=2, frames=3), whole)
    frames = vae.decode(z, chunk=1)
    for start in (1, 7, 20):
        assert torch.equal(vae.decode(z, chunk=1, start=start, frames=4), frames[:, start : start + 4])
    x = noise(1, 3, 13, 16, 24)
    moments = vae.encode_raw(x)
    assert moments.shape == (1, 24, 3, 2, 3)
    assert torch.equal(vae.encode_raw(x, chunk=1, frames=2), moments)
    changed = x.clone()
    changed[:, :, -1] += 1
    assert (vae.encode_raw(changed) != moments)[:, :, 0].any()  # it sees what comes later
    video = x.clamp(0, 1).permute(0, 2, 3, 4, 1)
    parts = list(vae.encode_stream(iter(video[0])))  # whose end nobody knows beforehand
    assert torch.equal(torch.cat(parts, 2), vae.encode(video))


@torch.no_grad()
def test_the_decoder_is_fused(tiny, noise, atol):
    decoder = tiny.decoder
    assert decoder.program.why_not_fused() is None
    assert "waves" in tiny.encoder.program.why_not_fused()
    network = fuse(decoder, torch.float32)
    for count in (1, 4):
        z = noise(12, count, 2, 3)
        expected = decoder(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)
        for chunk, frames in ((4, 0), (1, 1), (3, 2)):
            for parking in (None, Parking(None, 0)):
                torch.testing.assert_close(fused(network, z, chunk, frames, parking), expected, rtol=0, atol=atol)


def test_the_published_one_and_files_of_a_half(tiny, tmp_path):
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert ARCHITECTURE.config_of(shapes, {}) == ARCHITECTURE.published.config
    assert detect(shapes) is ARCHITECTURE
    counts = [sum(p.numel() for p in half.parameters()) / 1e6 for half in (model.decoder, model.encoder)]
    assert counts == [pytest.approx(362.5, abs=0.05), pytest.approx(97.2, abs=0.05)]
    later = model.decoder.program.work(3, 60, 106).flop - model.decoder.program.work(2, 60, 106).flop
    assert later / (6 * 480 * 848) == pytest.approx(15.81e6, rel=0.01)
    half = {k.removeprefix("decoder."): v for k, v in tiny.state_dict().items() if k.startswith("decoder.")}
    save_file(half, tmp_path / "decoder.safetensors")
    vae = load(tmp_path / "decoder.safetensors", device="cpu", norm_groups=8)
    assert vae.can_decode and not vae.can_encode
    with pytest.raises(CheckpointError, match="norm_groups=N"):
        load(tmp_path / "decoder.safetensors", device="cpu")
