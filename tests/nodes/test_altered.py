"""Networks that other nodes have changed: no weight tells of it."""

import pytest
import torch
from torch import nn
from zerowaste_vae.nodes.altered import altered


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
