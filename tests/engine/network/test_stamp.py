"""A stamp of a network's weights notices changes, and lets harmless ones pass."""

import pytest
import torch
from torch import nn
from zerowaste_vae.engine.network.stamp import Stamp


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4), nn.Sequential(nn.Linear(4, 4)), nn.BatchNorm1d(4),
                            nn.Linear(4, 4, bias=False))  # fmt: skip
    return network.requires_grad_(False)


def new_parameter(network):
    network[2][0].weight = nn.Parameter(network[2][0].weight.clone(), requires_grad=False)


def another_at_the_same_place(network):
    """As an allocator gives memory again that has just become free."""
    layer = network[2][0]
    values = layer.weight.data
    del layer.weight
    values.mul_(2)
    layer.weight = nn.Parameter(values, requires_grad=False)


def in_place(network):
    network[0].bias[1] += 1e-3


def loaded(network):
    network.load_state_dict(network.state_dict())


def assigned(network):
    network[2][0].weight.data = 2 * network[2][0].weight.data


def layer(network):
    network[1] = nn.GroupNorm(4, 4)


def without_a_layer(network):
    del network[1]


def taken_away(network):
    network[0].bias = None


def added(network):
    """As a LoRA with an offset for a layer that has none."""
    network[4].bias = nn.Parameter(torch.ones(4), requires_grad=False)


def buffer(network):
    network[3].running_mean += 1


CHANGES = [new_parameter, another_at_the_same_place, in_place, loaded, assigned, layer, without_a_layer, taken_away,
           added, buffer]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(network, change):
    stamp = Stamp(network)
    assert stamp.holds(network) and stamp.holds(network, closely=True)
    change(network)
    assert not stamp.holds(network) and not stamp.holds(network)
    assert Stamp(network).holds(network)


@pytest.mark.parametrize("change", [new_parameter, another_at_the_same_place, assigned, layer, buffer])
def test_changes_in_inference_mode_are_noticed(change):
    """Tensors made there do not count what is written to them."""
    with torch.inference_mode():
        network = nn.Sequential(nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4), nn.Sequential(nn.Linear(4, 4)),
                                nn.BatchNorm1d(4)).requires_grad_(False)  # fmt: skip
        stamp = Stamp(network)
        assert stamp.holds(network)
        change(network)
        assert not stamp.holds(network)
        stamp = Stamp(network)
        network[0].weight.mul_(2)
        assert not stamp.holds(network)


def test_moved_in_inference_mode(network):
    """As a host moves weights, which torch then no longer counts writes to."""
    stamp = Stamp(network)
    with torch.inference_mode():
        for tensor in network.parameters():
            tensor.data = tensor.data.clone()
        assert stamp.holds(network) and stamp.holds(network)
        network[0].weight.mul_(2)
        assert not stamp.holds(network)


def test_values_of_every_size(network):
    """A change is seen at the ends of a long axis too, whatever the layout; tensors without values are no trouble."""
    wide = nn.Conv2d(40, 33, 3, bias=False).requires_grad_(False)
    wide.none, wide.one = nn.Parameter(torch.empty(0), False), nn.Parameter(torch.ones(()), False)
    for change in (lambda: wide.weight.data[16:].neg_(), lambda: wide.weight.data[:, :20].mul_(2),
                   lambda: wide.one.data.add_(1)):  # fmt: skip
        stamp = Stamp(wide)
        wide.to(memory_format=torch.channels_last)
        assert stamp.holds(wide, closely=True)
        wide.to(memory_format=torch.contiguous_format)
        assert stamp.holds(wide, closely=True)
        change()
        assert not stamp.holds(wide, closely=True)


def test_uncounted_writes(network):
    """A close look sees writes that torch does not count."""
    stamp = Stamp(network)
    network[0].weight.data.mul_(1.5)
    assert stamp.holds(network) and not stamp.holds(network, closely=True)


def test_a_network_that_was_moved_is_the_same(network):
    """Elsewhere in memory, and laid out otherwise, with the same values."""
    stamp = Stamp(network)
    for layer in network.modules():
        if isinstance(layer, nn.Conv3d):
            layer.to(memory_format=torch.channels_last_3d)
        for tensor in layer.parameters(recurse=False):
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
    assert stamp.holds(network) and stamp.holds(network)
    with torch.no_grad():
        network[0].weight.mul_(2)
    assert not stamp.holds(network)


def test_another_network_is_another(network):
    stamp = Stamp(network)
    other = nn.Sequential(*network)
    assert not stamp.holds(other)


def test_nothing_is_kept_alive(network):
    stamp, parts = Stamp(network), list(network)
    del network
    assert stamp.holds(nn.Sequential(*parts)) is False
