"""Every family as it runs on a GPU, small, against plain torch: the same frames in whole frames and blended tiles, in
any chunks and parts of a clip, whatever is switched off. LTX, Cosmos and the refiner run plain torch at these widths,
too: of theirs only chunks and parts are looked at."""

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.options import DEFAULTS

from . import originals
from .small import SMALL, small

PLAIN = DEFAULTS.switched(off=["triton_fusion"])


@pytest.fixture(scope="module", autouse=True)
def on_references():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        yield


@pytest.fixture(scope="module", params=SMALL)
def pair(request, on_references):
    """(fused VAE, the same in plain torch, latents)"""
    vae = load(small(request.param), "fp32", "cpu")
    plain = vae.with_options(PLAIN)
    latents = 3 - (request.param == "ltx-diffusion")  # its windows take time on a CPU
    if vae.architecture.temporal == 1:
        latents = 1 if vae.architecture.still else 7
    return vae, plain, torch.randn(1, vae.latent_channels, latents, 2, 4, generator=torch.Generator().manual_seed(1))


def close(actual, expected):
    """As sums in other orders are: 3.3e-5 at most of all here on one CPU."""
    originals.close(actual, expected, 1e-4)


def test_all_are_here():
    assert set(SMALL) == {a.name for a in ARCHITECTURES}


def test_chunks_tiles_and_parts_of_a_clip(pair):
    vae, plain, z = pair
    for tiling in ({}, {"tiling": "blended", "tile": 3 * vae.spatial, "overlap": vae.spatial}):
        expected = plain.decode(z, **tiling)
        assert expected.std() > 0.01
        for chunk in (1, 2):
            close(vae.decode(z, chunk=chunk, **tiling), expected)
        if expected.shape[1] > 1:
            close(vae.decode(z, chunk=2, start=3, frames=4, **tiling), expected[:, 3:7])


def test_switches(pair):
    vae, plain, z = pair
    expected = plain.decode(z)
    for off in ["flash_attention"], ["composed_upsample"]:
        close(vae.with_options(DEFAULTS.switched(off=off)).decode(z), expected)


def test_encodes(pair):
    vae, plain, z = pair
    if vae.can_encode:
        size = vae.frames(z.shape[2]), *(n * vae.spatial for n in z.shape[3:])
        video = torch.rand(1, *size, 3, generator=torch.Generator().manual_seed(2))
        expected = plain.encode(video)
        for chunk in (1, 2):
            close(vae.encode(video, chunk=chunk), expected)


def test_the_callers_settings_of_torch_change_nothing(pair):
    """Other packs call a VAE inside autocast, or leave another default type behind."""
    vae, plain, z = pair
    expected = [each.decode(z) for each in (vae, plain)]
    torch.set_default_dtype(torch.float16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            made = [each.decode(z) for each in (vae, plain)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*both) for both in zip(made, expected, strict=True))
