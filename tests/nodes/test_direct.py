"""A VAE's network as other packs call it: the host's layout, run by the VAE."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from zerowaste_vae.nodes.direct import Direct


class Vae:
    """A latent pixel becomes 2x2 frames' pixels of its first three channels, in 0..1."""

    def __init__(self) -> None:
        self.network, self.decoder = nn.Linear(2, 2), {}
        self.first_stage_model = Direct(self.network, weakref.proxy(self))

    def decode(self, samples_in: torch.Tensor) -> torch.Tensor:
        return samples_in[:, :3].movedim(1, -1).repeat_interleave(2, -2).repeat_interleave(2, -3)

    def encode(self, pixel_samples: torch.Tensor) -> torch.Tensor:
        return pixel_samples.movedim(-1, 1)[..., ::2, ::2]


def test_halves_have_the_hosts_layout_and_range():
    vae = Vae()
    for shape in ((1, 4, 5, 3, 2), (2, 4, 3, 2)):
        z = torch.rand(shape)
        frames = vae.first_stage_model.decode(z)
        assert frames.shape == (shape[0], 3, *shape[2:-2], 6, 4)
        torch.testing.assert_close(frames[..., ::2, ::2], 2 * z[:, :3] - 1)
        torch.testing.assert_close(vae.first_stage_model.encode(frames), z[:, :3])


def test_it_is_the_network_otherwise_and_holds_no_vae():
    vae = Vae()
    direct, left = vae.first_stage_model, weakref.ref(vae)
    assert direct.state_dict().keys() == {"weight", "bias"} and next(iter(direct.parameters())) is vae.network.weight
    assert not hasattr(direct, "per_channel_statistics")
    gc.disable()
    try:
        del vae
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name, option", [("decode_timestep", "timestep"), ("decode_noise_scale", "noise")])
def test_what_nodes_set_on_a_network_is_an_option_of_decodes(name, option):
    vae = Vae()
    direct = vae.first_stage_model
    assert not hasattr(direct, name)
    setattr(direct, name, 0.5)
    assert vae.decoder == {option: 0.5} and getattr(direct, name) == 0.5
    direct.something = 3
    assert direct.something == 3
