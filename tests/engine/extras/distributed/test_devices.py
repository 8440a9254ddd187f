"""Devices that share a call, and files that are resumed, have the same kernels: their bits depend on them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import InputError, load
from zerowaste_vae.engine.extras.distributed import devices
from zerowaste_vae.engine.extras.distributed.consistency import of_bits
from zerowaste_vae.engine.kernels.prebuilt import library as sets
from zerowaste_vae.engine.kernels.targets import capabilities, prebuilt, without_kernels

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def contents(monkeypatch):
    """Return the contents of the sets, by their identity."""
    held = {"A": "a1", "C": "c1"}
    monkeypatch.setattr(sets, "library", lambda: SimpleNamespace(identity=held.__getitem__))
    return held


def test_identity(contents):
    """The launcher and its kernels are an identity."""
    card = prebuilt("a GPU", 90, "A")
    assert card.identity == "A a1" and prebuilt("a GPU", 86, "A").identity == card.identity
    contents["A"] = "a2"
    assert card.identity == "A a2"
    found = [capabilities("a GPU", 90, version).identity for version in ((3, 6), (3, 7))]
    assert found == ["triton 3.6", "triton 3.7"] and without_kernels("a GPU", 90, ["no"]).identity == "plain"


def test_other_kernels(contents, monkeypatch):
    """As where a set has failed on one of them."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    plain = without_kernels("a GPU", 90, ["no"])
    here = {FIRST: [prebuilt("a GPU", 90, "A"), plain], SECOND: [prebuilt("a GPU", 90, "A"), plain]}
    monkeypatch.setattr(devices, "ways", lambda device, asked: here[device])
    both = lambda: [(device, devices.kind_of(device, "auto")) for device in here]  # noqa: E731
    devices.same_kind(both(), mixed=False)
    here[SECOND] = [prebuilt("a GPU", 90, "C"), plain]
    with pytest.raises(InputError, match=r"a GPU \(A a1, plain\) and cuda:1 is a GPU \(C c1, plain\)"):
        devices.same_kind(both(), mixed=False)
    assert devices.kind_of(FIRST) == devices.kind_of(SECOND) == "a GPU"  # equally fast


def test_kernels_that_run(contents, vae_file):
    """The kernels that run count, not those asked for."""
    vae = load(vae_file, device="cpu")
    asked = vae.with_options(replace(vae.options, kernels="C"))
    assert of_bits(vae) == of_bits(asked)
    one, two = SimpleNamespace(**{"options": vae.options, "can_decode": True, "can_encode": True}), None
    ways = {"decoder": prebuilt("a GPU", 90, "C"), "encoder": capabilities("a GPU", 90, (3, 6))}
    one.kernels = ways.__getitem__
    two = of_bits(one)
    assert two[1] == {"decoder": "C c1", "encoder": "triton 3.6"}
    contents["C"] = "c2"
    assert of_bits(one) != two
