"""On a real GPU: later launches of Triton's kernels go through the driver and compute the same bits."""

import threading
from dataclasses import replace

import pytest
import torch
from zerowaste_vae import demo_vae_path, load
from zerowaste_vae.engine.kernels import by_triton, launching
from zerowaste_vae.engine.kernels.cards import TRITON
from zerowaste_vae.engine.kernels.norm_act import Norm, norm_act
from zerowaste_vae.engine.kernels.targets import ways

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def launched(monkeypatch):
    """Names of kernels as they are launched by Triton, and as they are through the driver."""
    if TRITON not in [one.way for one in ways(DEVICE)]:
        pytest.skip("Triton does not run here")
    monkeypatch.setattr(launching, "_launchers", {})
    seen = {"triton": [], "driver": []}
    by, bound = by_triton.ByTriton._by_triton, by_triton.Bound.__call__

    def triton(self, *arguments):
        seen["triton"].append(self._kernel)
        return by(self, *arguments)

    def driver(self, *arguments):
        seen["driver"].append(self._function)
        return bound(self, *arguments)

    monkeypatch.setattr(by_triton.ByTriton, "_by_triton", triton)
    monkeypatch.setattr(by_triton.Bound, "__call__", driver)
    return seen


@pytest.fixture
def vae():
    vae = load(demo_vae_path(), precision="fp16", device="cuda")
    vae.options = replace(vae.options, kernels=TRITON)
    return vae


def test_a_decode(launched, vae):
    z = torch.randn(1, 16, 5, 16, 20, generator=torch.Generator().manual_seed(0))
    first = vae.decode(z)
    once = len(launched["triton"])
    again = vae.decode(z)
    assert torch.equal(first, again)
    assert len(launched["triton"]) == once, launched["triton"][once:]  # nothing is launched by Triton twice
    assert len(launched["driver"]) > once


def normed(x, out):
    norm_act(x, Norm("l2", torch.ones(64, device=x.device)), out)
    return out


def tensors(device=DEVICE, lead=0):
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(2 * 30 * 40 * 64 + lead, device=device, generator=draw, dtype=torch.float16)[lead:]
    return x.view(2, 30, 40, 64), torch.zeros(4, 32, 42, 64, device=device, dtype=torch.float16)


def test_another_thread(launched):
    """A thread that has done nothing on the GPU launches what another one bound."""
    first, found = normed(*tensors()), []
    normed(*tensors())
    before = len(launched["driver"])
    thread = threading.Thread(target=lambda: found.append(normed(*tensors()).clone()))
    thread.start()
    thread.join()
    assert torch.equal(first, found[0]) and len(launched["driver"]) > before


def test_another_device(launched):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    first = normed(*tensors()).cpu()
    other = torch.device("cuda", 1)
    for _ in range(2):
        with torch.cuda.device(other):
            assert torch.equal(first, normed(*tensors(other)).cpu())
        assert torch.equal(first, normed(*tensors()).cpu())


def test_a_graph(launched):
    x, out = tensors()
    first = normed(x, out).clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        normed(x, out)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            normed(x, out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, out) and launched["driver"]


def test_addresses_that_are_no_multiple_of_16(launched):
    """They need another kernel, before and after the one that is bound."""
    for lead in (0, 0, 1, 0):
        x, out = tensors(lead=lead)
        expected = normed(x.clone(), torch.zeros_like(out)) if lead else normed(x, torch.zeros_like(out))
        assert torch.equal(expected, normed(x, out))
