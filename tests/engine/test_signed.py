"""Frames in -1..1 and beyond: what the network makes and takes, in every family, under every kind of plan."""

import pytest
import torch
from zerowaste_vae import InputError, load
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.request import Request

from .families.small import SMALL, WHOLE, small

#: Beyond -1..1 for a part of the values, so that a clamp would show.
LOUD = 4.0


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(monkeypatch, request):
    if request.param:  # a CPU then runs the references of the fused operators
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)


def latents(vae, noise):
    still = vae.architecture.still
    return LOUD * noise(1, vae.latent_channels, *(() if still else (2,)), 6, 8)


@pytest.mark.parametrize("family", SMALL)
def test_signed_frames_are_those_of_0_to_1_before_the_clamp(family, noise):
    vae = load(small(family), device="cpu")
    z = latents(vae, noise)
    options = {"seed": 0} if family.startswith("ltx") else {}
    unit, signed = (vae.decode(z, range=name, **options) for name in ("unit", "signed"))
    assert (0.5 * signed + 0.5).clamp(0, 1).sub(unit).abs().max() < 1e-6 * max(1, float(signed.abs().max()))
    assert signed.min() < -0.1  # not 0..1


@pytest.mark.parametrize("family", ["seedvr2", "wan2.1", "flux", "hunyuanvideo"])
def test_signed_frames_are_the_networks(family, noise, fused):
    vae = load(small(family), device="cpu")
    z = latents(vae, noise)
    raw = vae.decode_raw(z / vae.scale).movedim(1, -1)
    signed = vae.decode(z, range="signed")
    assert raw.abs().max() > 1  # values that a clamp would change
    assert signed.sub(raw).abs().max() < 2e-5 * raw.std()


def test_signed_frames_in_tiles_streams_parts_and_halves(noise, fused):
    vae = load(small("wan2.1"), device="cpu")
    z = LOUD * noise(1, 16, 2, 6, 6)
    whole = vae.decode(z, range="signed")
    assert torch.equal(torch.cat(list(vae.stream(z, range="signed", chunk=1)), 1), whole)
    assert torch.equal(vae.decode(z, range="signed", start=1, frames=2), whole[:, 1:3])
    assert torch.equal(vae.decode(z, range="signed", output="float16"), whole.half())
    tiles = {"tiling": "blended", "tile": 32, "overlap": 16}
    unit, signed = (vae.decode(z, range=name, **tiles) for name in ("unit", "signed"))
    assert signed.abs().max() > 1
    assert (0.5 * signed + 0.5).clamp(0, 1).sub(unit).abs().max() < 1e-6 * signed.abs().max()


@pytest.mark.parametrize("family", WHOLE)
def test_encode_takes_signed_frames_and_gives_moments(family, noise, fused):
    vae = load(random_checkpoint(WHOLE[family], architecture=by_name(family)), device="cpu")
    still = vae.architecture.still
    x = LOUD * noise(1, *(() if still else (5,)), 48, 64, 3)
    clip = x[:, None] if still else x
    raw = vae.encode_raw(clip.movedim(-1, 1))
    moments = vae.encode(x, range="signed", moments=True)
    assert moments.shape == raw.shape
    assert moments.sub(raw).abs().max() < 2e-5 * raw.std()
    mean = vae.encode(x, range="signed")
    assert torch.equal(mean, moments.chunk(2, 1)[0] * vae.scale)
    if not still:
        assert torch.equal(torch.cat(list(vae.encode_stream(x[0], range="signed")), 2), mean)


def test_what_signed_frames_cannot_be(noise):
    vae = load(random_checkpoint(WHOLE["wan2.1"], architecture=by_name("wan2.1")), device="cpu")
    with pytest.raises(InputError, match="not clamped, and bytes are"):
        Request(range="signed", output="uint8")
    with pytest.raises(InputError, match="range='both' is not one of unit, signed"):
        vae.decode(noise(1, 16, 1, 4, 4), range="both")
    bytes_ = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    for encode in (vae.encode, lambda x, **o: list(vae.encode_stream(x, **o))):
        with pytest.raises(InputError, match="is for floats in"):
            encode(bytes_, range="signed")
    with pytest.raises(InputError, match="gives no sample"):
        vae.encode(torch.zeros(1, 32, 32, 3), moments=True, seed=1)
