"""Image VAEs of the KL family against the recorded outputs of the originals, and as a user loads them."""

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae import load
from zerowaste_vae.engine.archs import detect
from zerowaste_vae.engine.archs.kl import FLUX, FLUX2, SD

FAMILIES = {"sd": SD, "flux": FLUX, "flux2": FLUX2}
#: Of the output's standard deviation.
BOUND = 4e-5
#: The published widths' parameters, with the statistics of Flux.2's latents.
PUBLISHED = {"sd": 83_653_863, "flux": 83_819_683, "flux2": 84_046_115 + 256}


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request, shared):
    """(family, VAE of the recorded weights, recorded tensors with an axis for time)"""
    folder = shared / "golden" / "image"
    vae = load(folder / f"image_{request.param}.weights.safetensors", device="cpu")
    tensors = load_file(folder / f"image_{request.param}.io.safetensors")
    return request.param, vae, {k: v.unsqueeze(2) for k, v in tensors.items()}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=BOUND * float(expected.std()))


@pytest.mark.parametrize("family", FAMILIES)
def test_published_sizes(family):
    architecture = FAMILIES[family]
    config = architecture.published.config
    with torch.device("meta"):
        state = architecture.build(config).state_dict()
    assert sum(t.numel() for t in state.values()) == PUBLISHED[family]
    shapes = {k: tuple(v.shape) for k, v in state.items()}
    assert architecture.configure(shapes, None) == config
    assert detect(shapes) is architecture


def test_decodes_are_the_originals(golden):
    family, vae, tensors = golden
    assert (vae.arch, vae.temporal, vae.spatial) == (family, 1, 16 if family == "flux2" else 8)
    for name in ("small", "batch", "odd"):
        z, expected = tensors[f"{name}.z"], tensors[f"{name}.decoded"]
        close(vae.decode_raw(z), expected)
        shown = vae.decode(z)
        assert shown.shape == (z.shape[0], 1, *expected.shape[3:], 3)
        close(shown, expected.clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1))


def test_encodes_are_the_originals(golden):
    _, vae, tensors = golden
    for name in ("e1", "e2"):
        x = tensors[f"{name}.x"]
        if f"{name}.moments" in tensors:
            close(vae.encode_raw(x), tensors[f"{name}.moments"])
        close(vae.encode(x.permute(0, 2, 3, 4, 1).mul(0.5).add(0.5)), tensors[f"{name}.latent"])
