"""Networks and VAEs that other nodes have changed, which no weight tells of, and those that other packs call."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from zerowaste_vae.nodes.networks import Direct, altered, file_of, patched
from zerowaste_vae.nodes.networks import replaced as other_call


def circular(layer):
    layer.padding_mode = "circular"


def replaced(layer):
    layer._conv_forward = lambda x, weight, bias: x


def put_back(layer):
    layer._conv_forward = nn.Conv2d._conv_forward.__get__(layer, nn.Conv2d)
    layer.padding_mode = "zeros"


def own_forward(layer):
    layer.forward = lambda x: 2 * x


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change, seen", [(circular, True), (replaced, True), (own_forward, True), (hooked, True),
                                          (put_back, False), (torch.nn.Module.eval, False)])  # fmt: skip
def test_changes_are_seen(change, seen):
    network = nn.Sequential(nn.Conv2d(1, 1, 3), nn.SiLU(), nn.Conv2d(1, 1, 3))
    assert altered(network) is None
    change(network[2])
    assert altered(network) == ("2" if seen else None)


class Network(nn.Sequential):
    def decode(self, z):
        return self(z)


def test_a_network_with_another_decode_is_seen():
    network = Network(nn.Conv2d(1, 1, 3))
    network.shown = print  # no method of its kind
    assert altered(network) is None
    network.decode = lambda z: z
    assert altered(network)
    network.decode = Network.decode.__get__(network)
    assert altered(network) is None


class Host:
    """As ComfyUI's VAE: what it does to pictures is its own's, set when it is made."""

    def __init__(self):
        self.process_input, self.process_output = lambda x: 2 * x - 1, lambda x: (x + 1) / 2
        self.patcher = SimpleNamespace(model=SimpleNamespace(current_weight_patches_uuid=1), patches_uuid=1, patches={},
                                       object_patches={}, backup={"weight": 1})  # fmt: skip

    def decode(self, samples):
        return samples

    def encode(self, pixels):
        return pixels


class Ours(Host):
    def decode(self, samples):
        return samples


class Theirs(Host):
    def encode(self, pixels):
        return pixels


class Stranger:
    """A pack's object in place of a VAE, which is of no class of the host's."""

    def __init__(self):
        self.first_stage_model = nn.Linear(2, 2)

    def decode(self, samples):
        return samples


def another(x):
    return x


another.__module__ = "another_pack"


def wrapped(vae):
    vae.decode = functools.wraps(vae.decode)(lambda samples: samples)


def of_the_kind(vae):
    vae.decode = type(vae).decode.__get__(vae)


def into_pictures(vae):
    vae.process_output = another


def from_pictures(vae):
    vae.process_input = another


@pytest.mark.parametrize("kind, asked, change, seen", [
    (Host, None, wrapped, "decode"), (Host, None, into_pictures, "process_output"), (Host, None, of_the_kind, None),
    (Host, None, from_pictures, "process_input"), (Host, None, id, None), (Ours, Ours, id, None),
    (Ours, Ours, wrapped, "decode"), (Ours, Ours, into_pictures, "process_output"), (Theirs, None, id, "encode"),
    (Ours, None, id, "decode"), (Host, Host, id, None), (Host, Host, into_pictures, "process_output"),
    (Theirs, Host, id, "encode"), (Stranger, Host, id, "decode"),
])  # fmt: skip
def test_calls_of_a_vae_that_are_not_its_kinds(kind, asked, change, seen):
    vae = kind()
    change(vae)
    assert other_call(vae, asked) == seen


def test_patches_over_a_model():
    """Its own, and those that another patcher of the same model has left on it."""
    patcher = Host().patcher
    assert patched(patcher) is None and patched(None) is None
    patcher.model.current_weight_patches_uuid = None  # not loaded
    assert patched(patcher) is None
    patcher.model.current_weight_patches_uuid = 2
    left = patched(patcher)
    patcher.patches, patcher.patches_uuid = {"weight": ["a LoRA"]}, 3
    own = patched(patcher)
    patcher.patches, patcher.object_patches = {}, {"decoder": 1}
    assert None not in (left, own, patched(patcher)) and len({left, own, patched(patcher)}) == 3


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


def test_what_newer_hosts_tell_a_network():
    """A buffer for the frames is filled; a tile or a device is the engine's own choice. Nothing else is made up."""
    direct, z = (vae := Vae()).first_stage_model, torch.rand(1, 4, 5, 3, 2)
    frames, buffer = direct.decode(z), torch.zeros(1, 3, 5, 6, 4)
    assert direct.decode(z, output_buffer=buffer, preferred_tile=2) is buffer and torch.equal(buffer, frames)
    assert torch.equal(direct.encode(frames, device="cpu"), direct.encode(frames))
    assert not hasattr(direct, "comfy_has_chunked_io") and vae.decoder == {}


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
def test_settings_on_a_network(name, option):
    """What nodes set on a network is an option of decodes."""
    vae = Vae()
    direct = vae.first_stage_model
    assert not hasattr(direct, name)
    setattr(direct, name, 0.5)
    assert vae.decoder == {option: 0.5} and getattr(direct, name) == 0.5
    direct.something = 3
    assert direct.something == 3


def test_the_file_that_the_hosts_loader_read_is_known():
    def load_vae_patcher(path, metadata, device):
        pass

    def load_checkpoint_vae_patcher(path, folder):
        pass

    for made in ((load_vae_patcher, ("a/b.sft", None, None)), (load_checkpoint_vae_patcher, ("a/b.sft", "folder"), 2)):
        assert file_of(SimpleNamespace(patcher=SimpleNamespace(cached_patcher_init=made))) == Path("a/b.sft")
    for other in (None, (print, ("a/b.sft",))):
        assert file_of(SimpleNamespace(patcher=SimpleNamespace(cached_patcher_init=other))) is None
    assert file_of(SimpleNamespace()) is None  # hosts before 0.33
