"""Stand-ins for the VAEs of other packs: results, interface, devices, and whole frames for a caller's tiles."""

from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import InputError, load
from zerowaste_vae.adapters import SeedVR2VAE, WanVideoVAE
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import wan

from ...families.small import small


@pytest.fixture(scope="module")
def wan_vae():
    return load(random_checkpoint(wan.Config((8, 8, 8, 8), (8, 8, 8, 8)), architecture=wan.WAN21), device="cpu")


@pytest.fixture
def like():
    g = torch.Generator().manual_seed(3)
    return SimpleNamespace(mean=torch.randn(1, 16, 1, 1, 1, generator=g), dtype=torch.bfloat16,
                           inv_std=1 + torch.rand(1, 16, 1, 1, 1, generator=g))  # fmt: skip


@pytest.fixture
def theirs(wan_vae, like):
    return WanVideoVAE(wan_vae, like, vram_gb=1)


def test_latents_are_normalised_and_frames_signed(theirs, wan_vae, like, noise):
    z = 3 * noise(2, 16, 2, 4, 6)
    raw = wan_vae.decode_raw(z / like.inv_std + like.mean)
    made = theirs.decode(z, "cpu")
    assert raw.abs().max() > 1
    assert torch.stack(made).sub(raw).abs().max() < 2e-5 * raw.std()
    mean = wan_vae.encode_raw(raw).chunk(2, 1)[0]
    latent = theirs.encode(list(raw), "cpu")
    assert latent.sub((mean - like.mean) * like.inv_std).abs().max() < 2e-5 * latent.std()


def test_types_and_devices_of_results(theirs, noise):
    z = noise(1, 16, 1, 4, 4).to(torch.bfloat16)
    assert theirs.decode(z, "cpu")[0].dtype == torch.float32
    (frames,) = theirs.decode(z, "cpu", output_device="cpu", output_dtype=torch.float16, unknown=1)
    assert frames.dtype == torch.float16
    latent = theirs.encode(frames[None].to(torch.bfloat16), "cpu", verbose=True)
    assert (latent.dtype, tuple(latent.shape)) == (torch.float32, (1, 16, 1, 4, 4))


def test_whole_frames_in_the_place_of_tiles(theirs, noise, caplog):
    z = noise(1, 16, 2, 8, 8)
    with caplog.at_level("INFO"):
        tiled = theirs.decode(z, "cpu", tiled=True, tile_size=(4, 4), tile_stride=(2, 2))[0]
    whole = theirs.decode(z, "cpu")[0]
    assert torch.equal(tiled, whole)
    assert "the caller's tiles are not used" in caplog.text


def test_tiles_that_cover_everything_are_the_whole(wan_vae, like, noise):
    """Theirs clamp."""
    theirs, z = WanVideoVAE(wan_vae, like, tiles="theirs"), 3 * noise(1, 16, 2, 4, 6)
    tiled = theirs.decode(z, "cpu", tiled=True, tile_size=(4, 6), tile_stride=(4, 6))[0]
    assert torch.equal(tiled, theirs.decode(z, "cpu")[0].clamp(-1, 1))


def test_a_clip_of_its_own_at_the_end(theirs, noise):
    z = noise(1, 16, 3, 4, 4)
    ended = theirs.decode(z, "cpu", end_=True)[0]
    first, last = (theirs.decode(part, "cpu")[0] for part in (z[:, :, :-1], z[:, :, -1:]))
    assert torch.equal(ended, torch.cat([first, last], 1))
    latent = theirs.encode(ended[None], "cpu", end_=True)
    assert torch.equal(latent[:, :, -1:], theirs.encode(last[None], "cpu"))


def test_samples_come_from_torchs_generator(theirs, noise):
    x = noise(1, 3, 5, 32, 32)
    torch.manual_seed(1)
    first = theirs.encode(x, "cpu", sample=True)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(theirs.encode(x, "cpu", sample=True), first)
    assert torch.equal(torch.rand(1), after)
    assert not torch.equal(theirs.encode(x, "cpu"), first)


def test_it_is_a_module_that_does_not_move(theirs, wan_vae):
    assert theirs.to("cpu") is theirs and theirs.model.to(torch.device("cpu"), torch.float16) is theirs
    assert theirs.cpu() is theirs and theirs.half() is theirs and theirs.eval() is theirs
    assert (theirs.dtype, next(theirs.parameters()).device) == (torch.bfloat16, torch.device("cpu"))
    assert [name for name, _ in theirs.named_children()] == []
    assert list(theirs.state_dict()) == ["place"]
    theirs.clear_cache()
    assert theirs.vae is wan_vae and wan_vae.precision == "fp32"


def test_moving_to_the_cpu_gives_up_packed_weights(theirs, wan_vae, monkeypatch):
    given_up = []
    monkeypatch.setattr(wan_vae, "release", lambda: given_up.append(1))
    theirs.to("cpu")
    assert given_up == []  # it runs there
    monkeypatch.setattr(wan_vae, "device", torch.device("meta"))
    theirs.to(torch.float16)
    theirs.to("meta")
    assert given_up == []
    theirs.to("cpu", non_blocking=True)
    assert given_up == [1]


def test_settings_reach_the_run(wan_vae, like, noise):
    seen = []
    theirs = WanVideoVAE(wan_vae, like, progress=lambda *n: seen.append(n))
    theirs.decode(noise(1, 16, 1, 4, 4), "cpu")
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(InputError, match="vram_gb=-1 is below 0"):
        WanVideoVAE(wan_vae, like, vram_gb=-1).decode(noise(1, 16, 1, 4, 4), "cpu")


def test_seedvr2_in_the_types_of_the_caller(noise):
    vae = load(small("seedvr2"), device="cpu")
    theirs = SeedVR2VAE(vae, dtype=torch.bfloat16)
    z = noise(1, 16, 2, 4, 4)
    raw = vae.decode_raw(z)
    made = theirs.decode(z).sample
    assert made.sub(raw).abs().max() < 2e-5 * raw.std()
    half = theirs.decode(z.to(torch.bfloat16))[0]
    assert half.dtype == torch.bfloat16 and half.float().sub(raw).abs().max() < 0.1 * raw.std()
    assert theirs.decode(z[:, :, 0]).sample.ndim == 4
    assert theirs.preprocess(raw) is raw and theirs.postprocess(raw) is raw
    with pytest.raises(InputError, match="4n \\+ 1 frames, not 4"):
        theirs.preprocess(raw[:, :, :4])


def test_what_does_not_fit(wan_vae, like):
    for make, why in (
        (lambda: WanVideoVAE(load(small("seedvr2"), device="cpu"), like), "stands in for a VAE of Wan"),
        (lambda: SeedVR2VAE(wan_vae), "stands in for SeedVR2's VAE, and this one is wan2.1"),
        (lambda: WanVideoVAE(wan_vae, SimpleNamespace(mean=torch.zeros(48), inv_std=torch.ones(48))), "has 48 values"),
        (lambda: WanVideoVAE(wan_vae, like, tiles="mine"), "tiles='mine' is not one of whole, theirs"),
    ):
        with pytest.raises(InputError, match=why):
            make()
