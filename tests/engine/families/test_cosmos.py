"""Cosmos' tokenizer against recorded outputs of the original, whole and in chunks."""

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae import load
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.latents import read_latent
from zerowaste_vae.engine.extras.media.pngs import write_png_folder
from zerowaste_vae.engine.families import detect
from zerowaste_vae.engine.families.cosmos import ARCHITECTURE
from zerowaste_vae.engine.families.cosmos.factorised import from_wavelets, to_wavelets

from .originals import close


@pytest.fixture(scope="module")
def golden(shared):
    """(VAE of the recorded weights, recorded tensors)"""
    folder, name = shared / "golden" / "other", "cosmos_cv8x8x8"
    return load(folder / f"{name}.weights.safetensors", device="cpu"), load_file(folder / f"{name}.io.safetensors")


def test_decodes_and_encodes_are_the_originals(golden):
    vae, tensors = golden
    assert (vae.arch, vae.spatial, vae.temporal) == ("cosmos", 8, 8)
    for count in (1, 2, 3):
        decoded = vae.decode_raw(tensors[f"T{count}.latent"], chunk=1, frames=2)
        close(decoded, tensors[f"T{count}.decode"])
    for count in (1, 9, 17):
        moments = vae.encode_raw(tensors[f"enc{count}.pixels"], chunk=1, frames=3)
        close(vae.model.sample(moments), tensors[f"enc{count}.latent"])


def test_every_chunking_is_the_whole_clip(golden, noise):
    """Bit by bit; statistics of latents come again after 16 frames."""
    vae, _ = golden
    z = noise(1, 16, 18, 2, 2)
    whole = vae.decode_raw(z)
    assert whole.shape == (1, 3, 137, 16, 16)
    for chunk, frames in ((1, 0), (5, 3)):
        assert torch.equal(vae.decode_raw(z, chunk=chunk, frames=frames), whole)
    x = noise(1, 3, 26, 17, 26)  # what fills no latent is not read
    moments = vae.encode_raw(x)
    assert moments.shape == (1, 32, 4, 2, 3)
    assert torch.equal(vae.encode_raw(x, chunk=1, frames=2), moments)


def test_a_clip_goes_through_plans(golden, noise):
    vae, _ = golden
    z = noise(1, 16, 2, 2, 3)
    frames = vae.decode(z, chunk=1)
    assert frames.shape == (1, 9, 16, 24, 3)
    assert torch.equal(frames, vae.decode(z))
    assert vae.encode(frames).shape == z.shape
    assert torch.equal(vae.decode(z, start=4, frames=3), frames[:, 4:7])  # which sees all that comes before
    assert torch.isfinite(vae.encode(frames, seed=1)).all()


@pytest.mark.parametrize("count", [None, 9])
def test_streams_of_any_length(golden, noise, count):
    """Its memory grows with each frame: a plan needs their number."""
    vae, _ = golden
    video = noise(9, 16, 24, 3).clamp(-1, 1) * 0.5 + 0.5
    taken = []
    pieces = (taken.append(i) or frame for i, frame in enumerate(video))
    stream = vae.encode_stream(pieces, count=count)
    latents = [next(stream)]
    assert len(taken) == (9 if count is None else 1)
    latents += list(stream)
    assert torch.equal(torch.cat(latents, 2), vae.encode(video))


def test_the_command_encodes_a_clip(shared, tmp_path, noise):
    path = shared / "golden" / "other" / "cosmos_cv8x8x8.weights.safetensors"
    video = (noise(9, 16, 24, 3).clamp(-1, 1) * 127 + 128).to(torch.uint8)
    write_png_folder(tmp_path / "clip", video)
    assert main(["encode", str(tmp_path / "clip"), str(tmp_path / "a.safetensors"), "--vae", str(path), "--quiet"]) == 0
    assert torch.equal(read_latent(tmp_path / "a.safetensors"), load(path, device="cpu").encode(video))


def test_wavelets_come_back(noise):
    x = noise(1, 3, 4, 6, 8)
    torch.testing.assert_close(from_wavelets(to_wavelets(x)), x)
    mean = x.unflatten(4, (4, 2)).unflatten(3, (3, 2)).unflatten(2, (2, 2)).mean((3, 5, 7))
    torch.testing.assert_close(to_wavelets(x)[:, :3], mean)


def test_the_published_one():
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert ARCHITECTURE.config_of(shapes, {}) == ARCHITECTURE.published.config
    assert detect(shapes) is ARCHITECTURE
    counts = [sum(p.numel() for p in half.parameters()) / 1e6 for half in (model.decoder, model.encoder)]
    assert counts == [pytest.approx(62.7, abs=0.05), pytest.approx(42.9, abs=0.05)]
