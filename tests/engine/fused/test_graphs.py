"""Recorded chunks: replayed where they fit and only there, equal bit by bit, gone when anything they read goes."""

import gc

import pytest
import torch
from zerowaste_vae import Cancelled, load
from zerowaste_vae.engine.fused import graphs, runs
from zerowaste_vae.engine.fused import run as run_module
from zerowaste_vae.engine.fused.memory import Ring
from zerowaste_vae.engine.kernels.observe import watching
from zerowaste_vae.engine.optimize import DEFAULTS
from zerowaste_vae.engine.runtime.kept import KEPT, Kept
from zerowaste_vae.engine.vae import VideoVAE

from ..runtime.faults import fail_calls
from .fake_graph import FakeGraph

OFF = DEFAULTS.switched(off=["cuda_graphs"])


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Graphs on a CPU."""
    monkeypatch.setattr("zerowaste_vae.engine.vae.why_off", lambda *_: None)
    monkeypatch.setattr(graphs, "CudaGraph", FakeGraph)
    monkeypatch.setattr(runs, "why_not_on", lambda _: None)
    monkeypatch.setattr(FakeGraph, "made", [])
    monkeypatch.setattr(FakeGraph, "busy", 0.0)
    monkeypatch.setattr(FakeGraph, "failing", set())
    yield FakeGraph
    KEPT.release()


@pytest.fixture
def vae(vae_file):
    return load(vae_file, device="cpu")


def replayed(vae):
    return vae._fused.runs.replayed


def expected_of(vae, call, monkeypatch):
    """What the same VAE gives without graphs."""
    return call(vae.with_options(OFF))


@pytest.mark.parametrize(("latents", "chunk", "counts"), [
    (1, 1, [(0, 1), (1, 1), (1, 1)]),
    (2, 2, [(0, 1), (1, 1)]),
    (7, 1, [(4, 7), (7, 7)]),
    (7, 2, [(1, 4), (4, 4)]),
    (8, 3, [(0, 3), (3, 3)]),
])  # fmt: skip
def test_decodes_are_equal(vae, noise, latents, chunk, counts):
    z = noise(1, 16, latents, 3, 5)
    expected = vae.with_options(OFF).decode(z, chunk=chunk)
    for count in counts:
        assert torch.equal(vae.decode(z, chunk=chunk), expected)
        assert replayed(vae) == count
    other = noise(1, 16, latents, 3, 5, seed=1)
    assert torch.equal(vae.decode(other, chunk=chunk), vae.with_options(OFF).decode(other, chunk=chunk))
