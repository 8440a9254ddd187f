"""A part of a clip has the bits of the whole: what it is computed from is what the Program says, and no less."""

import pytest
import torch
from zerowaste_vae import InputError, load
from zerowaste_vae.engine import call
from zerowaste_vae.engine.archs import wan
from zerowaste_vae.engine.archs.wan import Config
from zerowaste_vae.engine.network.program import Program
from zerowaste_vae.engine.run.progress import Ticker
from zerowaste_vae.engine.run.results import Whole
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.video import TensorVideo

#: Latents of the clips: more than any of these networks looks back, which chunks of one make cheap.
T = 44


@pytest.fixture(scope="module", params=["seedvr2", "wan"])
def small(request, make_vae_file, seed_model, tmp_path_factory):
    """A VAE of tiny widths, and its latent and video: what a frame depends on, other widths would not change."""
    if request.param == "seedvr2":
        vae = load(make_vae_file((4, 4, 4, 4), (4, 4, 4, 4), 2, 3), device="cpu")
    else:
        model = wan.WAN21.build(Config(4, 4)).requires_grad_(False)
