"""Recorded chunks: replayed where they fit and only there, equal bit by bit, gone when anything they read goes."""

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.fused import graphs, runs
from zerowaste_vae.engine.models import wan
from zerowaste_vae.engine.optimize import DEFAULTS
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.vae import VideoVAE

from ..runtime.faults import leftovers
from .fake_graph import FakeGraph

OFF = DEFAULTS.switched(off=["cuda_graphs"])
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Graphs on a CPU, where nothing is left behind."""
    monkeypatch.setattr("zerowaste_vae.engine.vae.why_off", lambda *_: None)
    monkeypatch.setattr(graphs, "CudaGraph", FakeGraph)
    monkeypatch.setattr(runs, "why_not_on", lambda _: None)
    monkeypatch.setattr(FakeGraph, "made", [])
    monkeypatch.setattr(FakeGraph, "busy", 0.0)
    monkeypatch.setattr(FakeGraph, "failing", set())
    yield FakeGraph
    KEPT.release()
    assert leftovers() == []


@pytest.fixture
def vae(vae_file):
    return load(vae_file, device="cpu")


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def wan_vae(request, seed_model):
    config, architecture = {
        "2.1": (wan.Config((8, 8, 16, 16), (8, 16, 16, 16)), wan.WAN21),
        "2.2": (wan.Config((8, 16, 32, 32), (8, 16, 32, 32), 48, 2), wan.WAN22),
    }[request.param]
    model = wan.Wan(config).requires_grad_(False)
    seed_model(model, 3)
    return VideoVAE(model, architecture, "fp32", torch.float32, CPU)


def replayed(vae):
    return vae._fused.runs.replayed


def reason(vae):
    return dict(vae.last_report.off).get("cuda_graphs")


@pytest.mark.parametrize(("latents", "chunk", "counts"), [
    (1, 1, [(0, 1), (1, 1), (1, 1)]),
    (2, 2, [(0, 1), (1, 1)]),
    (6, 1, [(3, 6), (6, 6)]),
    (7, 2, [(1, 4), (4, 4)]),
])  # fmt: skip
def test_decodes_are_equal(vae, noise, latents, chunk, counts):
    plain = vae.with_options(OFF)
    clips = [noise(1, 16, latents, 1, 2, seed=seed) for seed in range(2)]
    expected = [plain.decode(z, chunk=chunk) for z in clips]
    for i, count in enumerate(counts):
        assert torch.equal(vae.decode(clips[i % 2], chunk=chunk), expected[i % 2])
        assert replayed(vae) == count


def test_encodes_are_equal(vae, noise):
    plain = vae.with_options(OFF)
    for frames in (1, 5, 41):
        video = noise(frames, 9, 17, 3).sigmoid()
        expected = plain.encode(video)
        for _ in range(3):
            assert torch.equal(vae.encode(video), expected)
        assert replayed(vae)[0] == replayed(vae)[1]


def test_wan_too(wan_vae, noise):
    vae, plain = wan_vae, wan_vae.with_options(OFF)
    z = noise(1, vae.latent_channels, 5, 1, 2)
    video = noise(25, vae.spatial + 3, 2 * vae.spatial, 3).sigmoid()
    expected = plain.decode(z, chunk=1), plain.encode(video)
    for _ in range(2):
        assert torch.equal(vae.decode(z, chunk=1), expected[0])
    assert replayed(vae) == (5, 5)
    for _ in range(2):
        assert torch.equal(vae.encode(video), expected[1])
    assert replayed(vae)[0] == replayed(vae)[1]
