"""Networks and VAEs that other nodes have changed: no weight tells of it."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from zerowaste_vae.nodes.altered import altered, patched
from zerowaste_vae.nodes.altered import replaced as other_call


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
    (Ours, None, id, "decode"),
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
