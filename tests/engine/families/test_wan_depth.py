"""Wan's networks with other numbers of levels or of residual blocks are refused for that reason."""

import re

import pytest
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.families import renamed
from zerowaste_vae.engine.loader import load

from ..checkpoints.test_shapes import wan_to_diffusers
from .small import small

RESAMPLING = 3  #: Place of a decoder level's last layer.


def deeper(name: str, level: int, index: int, blocks: int) -> list[str]:
    """The names of a layer in a decoder with so many residual blocks a level: the last one of three is repeated."""
    after = [blocks] if index == RESAMPLING else [2, *range(3, blocks)] if index == 2 else [index]
    nested = re.match(r"decoder\.upsamples\.\d+\.upsamples", name)
    pattern = r"upsamples\.\d+\.upsamples\.\d+" if nested else r"upsamples\.\d+"
    places = (f"upsamples.{level}.upsamples.{i}" if nested else f"upsamples.{level * (blocks + 1) + i}" for i in after)
    return [re.sub(pattern, place, name, count=1) for place in places if index < blocks or index == RESAMPLING]


def rebuilt(family, blocks):
    tensors = {}
    for name, tensor in small(family).tensors.items():
        m = re.match(r"decoder\.upsamples\.(\d+)\.(?:upsamples\.(\d+)\.)?", name)
        if m is None:
            tensors[name] = tensor
            continue
        level, index = (int(m[1]), int(m[2])) if m[2] else divmod(int(m[1]), 4)
        tensors |= dict.fromkeys(deeper(name, level, index, blocks), tensor)
    return tensors


@pytest.mark.parametrize("blocks", [1, 2, 4, 5])
@pytest.mark.parametrize("family", ["wan2.1", "wan2.2"])
def test_other_depths_are_refused_for_their_depth(family, blocks):
    assert load(Checkpoint(rebuilt(family, 3)), "fp32", "cpu").arch == family
    with pytest.raises(CheckpointError, match=r"another order .* whose 4 levels have 3 residual blocks each"):
        load(Checkpoint(rebuilt(family, blocks)), "fp32", "cpu")


@pytest.mark.parametrize("blocks", [4, 6])
def test_under_diffusers_names(blocks):
    tensors = {}
    for name, tensor in small("wan2.1").tensors.items():
        tensors[wan_to_diffusers(name)] = tensor
        if m := re.match(r"(decoder\.up_blocks\.\d\.resnets\.)2(\..*)", wan_to_diffusers(name)):
            tensors |= {f"{m[1]}{i}{m[2]}": tensor for i in range(3, blocks)}
    assert len(renamed(tensors)) == len(tensors)
    with pytest.raises(CheckpointError, match="whose 4 levels have 3 residual blocks each"):
        load(Checkpoint(tensors), "fp32", "cpu")
