"""A part of a clip has the bits of the whole; what it is computed from is what the Program says, and no less."""

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae import InputError, load
from zerowaste_vae.engine.execution import call
from zerowaste_vae.engine.execution.progress import Ticker
from zerowaste_vae.engine.execution.results import Whole
from zerowaste_vae.engine.execution.video import TensorVideo
from zerowaste_vae.engine.families import seedvr2, wan
from zerowaste_vae.engine.request import Request

#: Latents of the clips: more than any of these networks looks back.
T = 42
WIDTHS = (8, 8, 8, 8)
MODELS = {
    "seedvr2": lambda: seedvr2.ARCHITECTURE.build(seedvr2.Config(WIDTHS, WIDTHS, norm_groups=2)),
    "wan2.1": lambda: wan.WAN21.build(wan.Config(WIDTHS, (8, 16, 16, 16))),
    "wan2.2": lambda: wan.WAN22.build(wan.Config(WIDTHS, WIDTHS, 48, 2)),
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request, seed_model):
    """Build a network of the narrowest widths: they do not matter to what a frame depends on."""
    model = MODELS[request.param]().requires_grad_(False)
    seed_model(model, 3)
    return model


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def vae(model, tmp_path, request, monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None if request.param else "off")
    save_file(model.state_dict(), tmp_path / "vae.safetensors", {"norm_num_groups": "2"})
    return load(tmp_path / "vae.safetensors", device="cpu")


def first_finite(x):
    """Return the first number of [1, C, N, H, W] from which on all is finite."""
    return int((~x.isfinite()).flatten(3).any(-1)[0].any(0).nonzero()[-1]) + 1


def test_a_window_is_what_results_depend_on(model, noise):
    """NaN goes wherever there is a connection, however small its weight. What lies in front of a window may be lost,
    and each window begins as late as that allows."""
    z = noise(1, model.config.latent_channels, T, 1, 2)
    z[:, :, :2] = torch.nan
    first = first_finite(model.decoder(z))
    assert [model.decoder.program.window(n, n + 1, T)[0] for n in (first - 1, first)] == [1, 2]
    pixels = 16 if model.config.latent_channels == 48 else 8
    video = noise(1, 3, 4 * T - 3, pixels, pixels)
    video[:, :, : 4 * 2] = torch.nan
    first = first_finite(model.encoder(video))
    assert [model.encoder.program.window(n, n + 1, T)[0] for n in (first - 1, first)] == [1, 2]


def test_short_clips(model):
    """Windows of clips that are shorter than the field."""
    program = model.decoder.program
    assert program.window(0, 1, T) == (0, 1)
    assert program.window(7, 9, T) == (0, 3)
    assert program.window(0, 4 * T - 3, T) == (0, T)
    assert model.encoder.program.window(2, 5, T) == (0, 5)


def test_part_of_decode(vae, noise):
    """A part of a decode has the bits of the whole."""
    z = noise(1, vae.latent_channels, T, 1, 1)
    whole = vae.decode(z, chunk=1)
    last = whole.shape[1]
    reach = vae.model.decoder.program.reach[0]
    for start, frames in ((2, 1), (last - 6, 4), (last - 1, None)):
        done = []
        part = vae.decode(z, chunk=1, start=start, frames=frames, progress=lambda n, total: done.append((n, total)))  # noqa: B023
        assert torch.equal(part, whole[:, start : None if frames is None else start + frames])
        assert done[-1][0] == done[-1][1] == len(done)
        assert len(done) <= reach + 3
        assert vae.last_report.clip[1] == part.shape[1]


def test_part_of_encode(vae, noise):
    """A part of an encode has the bits of the whole."""
    count, size = 4 * T - 3, vae.spatial
    video = noise(1, count, size, 2 * size, 3).sigmoid()
    whole = vae.encode(video, chunk=1)
    for first, end in ((0, 2), (T - 3, T - 1)):
        moments = torch.empty(1, 2 * vae.latent_channels, end - first, 1, 2)
        results = Whole(moments.permute(0, 2, 3, 4, 1), first)
        for _ in call.encode(vae, TensorVideo(video), Request(chunk=1), Ticker(None, None), results, range(first, end)):
            pass
        assert torch.equal(moments.chunk(2, 1)[0] * vae.scale, whole[:, :, first:end])


@pytest.mark.parametrize(("model", "vae"), [("seedvr2", False), ("wan2.1", True)], indirect=True, ids=str)
def test_part_in_tiles(vae, noise):
    """A part in tiles has the bits of the whole."""
    z = noise(1, vae.latent_channels, T, 1, 3)
    options = {"tiling": "blended", "tile": 2 * vae.spatial, "overlap": vae.spatial, "chunk": 1}
    whole = vae.decode(z, **options)
    assert torch.equal(vae.decode(z, start=4 * T - 8, frames=3, **options), whole[:, 4 * T - 8 : 4 * T - 5])


def test_parts_that_are_none(vae, noise):
    z = noise(1, vae.latent_channels, 2, 1, 1)
    for options, says in (
        ({"start": 5}, "start=5 is no frame of this clip: it has 5"),
        ({"start": -1}, "start=-1"),
        ({"frames": 0}, "frames=0 is too few"),
    ):
        with pytest.raises(InputError, match=says):
            vae.decode(z, **options)
