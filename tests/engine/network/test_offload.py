"""Weights that wait in host memory and are lent to a device. The meta device stands in for a GPU: what is there has no
values, and shows where it came from."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.network import fused
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.gathered import tensors_of
from zerowaste_vae.engine.network.offload import lent, moving_bytes
from zerowaste_vae.engine.planning.fusable import half_not_fused
from zerowaste_vae.engine.precision.modes import PRECISIONS

from ..execution.test_last_stages import CONFIGS

CPU, META = torch.device("cpu"), torch.device("meta")


def halves():
    for architecture in ARCHITECTURES:
        for program in architecture.programs(CONFIGS[architecture.name]):
            if not half_not_fused(program, PRECISIONS[architecture.native]):
                yield pytest.param(architecture, program.half, id=f"{architecture.name}-{program.half}")


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def build(architecture):
    with META:
        model = architecture.build(CONFIGS[architecture.name])
    dtype = PRECISIONS[architecture.native]
    model.load_state_dict({k: torch.ones(t.shape, dtype=dtype) for k, t in model.state_dict().items()}, assign=True)
    return model.requires_grad_(False)


@pytest.mark.parametrize(("architecture", "name"), list(halves()))
def test_packing(architecture, name, no_collector, monkeypatch):
    """Nothing is left of them but what is packed, also where a packed tensor is a parameter as it is."""
    model = build(architecture)
    half, dtype = getattr(model, name), PRECISIONS[architecture.native]
    own, before = list(half.parameters()), {n: p.clone() for n, p in half.named_parameters()}
    alive, most, largest = weakref.WeakSet(), 0, 0

    def counted(device, *parts):
        nonlocal most, largest
        there = lent(device, *parts)
        new = {p for part in there for p in (part.parameters() if isinstance(part, nn.Module) else (part,))}
        alive.update(new)
        largest = max(largest, sum(p.nbytes for p in new))
        most = max(most, sum(p.nbytes for p in alive))
        return there

    # First, for torch holds frames of what it computes on the meta device for the first time.
    expected = fuse(getattr(copy.deepcopy(model).to(META), name), dtype)
    monkeypatch.setattr(fused, "lent", counted)
    network = fuse(half, dtype, device=META)
    assert all(t.is_meta for t in tensors_of(network).values())
    assert [(t.shape, t.stride(), t.dtype) for t in tensors_of(network).values()] == [
        (t.shape, t.stride(), t.dtype) for t in tensors_of(expected).values()]  # fmt: skip
    assert network.nbytes == expected.nbytes
    # A step may ask for several of its parts; steps around others for their first one's device.
    assert largest <= most <= 2 * largest and most < sum(p.nbytes for p in half.parameters())
    kept = {t.untyped_storage()._cdata for t in tensors_of(network).values()}
    assert all(p.untyped_storage()._cdata in kept for p in alive)
    assert all(p is q and p.device == CPU for p, q in zip(half.parameters(), own, strict=True))
    assert all(torch.equal(p, before[n]) for n, p in half.named_parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_a_half_is_lent_with_what_lies_beside_it(architecture, no_collector):
    model = build(architecture)
    for half in (model.encoder, model.decoder):
        if half is None or moving_bytes(half) != sum(p.nbytes for p in half.parameters()):
            continue  # a transformer has copies of its own
        there, *beside = lent(META, *half.everything())
        part = lies = None
        assert all(p.is_meta for p in there.parameters()) and all(p.device == CPU for p in model.parameters())
        assert there.beside().keys() == half.beside().keys()
        assert all(half.part(f"/{name}") is part for name, part in half.beside().items())
        for (name, part), lies in zip(there.beside().items(), beside, strict=True):
            assert there.part(f"/{name}") is part is lies and part is not half.part(f"/{name}")
            assert all(p.is_meta for p in (part.parameters() if isinstance(part, nn.Module) else (part,)))
        gone = [*map(weakref.ref, (there, *there.parameters()))]
        del there, beside, part, lies
        assert [ref() for ref in gone if ref() is not None] == []


def test_what_lies_there_is_not_copied():
    layer = nn.Linear(2, 3)
    for device in (CPU, torch.device("cpu", 0)):
        assert lent(device, layer, layer.bias) == (layer, layer.bias)


def test_inference_mode():
    """Weights borrowed in inference mode serve calls outside of it."""
    with torch.inference_mode():
        weights = nn.Linear(2, 3).requires_grad_(False)
        (there,) = lent(META, weights)
    assert not any(p.is_inference() or p.requires_grad for p in there.parameters())


def test_no_room():
    """Weights that the device has no room for stay as they were."""
    layer = nn.Linear(2, 3)
    before = layer.weight, layer.bias

    def full(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    layer.bias.to = full
    with pytest.raises(torch.OutOfMemoryError):
        lent(META, layer)
    assert layer.weight is before[0] and layer.bias is before[1] and layer.weight.device == CPU
