"""Recorded chunks: replayed where they fit and only there, equal bit by bit, gone when anything they read goes."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from zerowaste_vae import Cancelled
from zerowaste_vae.engine.execution import reuse as runs
from zerowaste_vae.engine.extras.graphs import graph_rule, graphs
from zerowaste_vae.engine.families import kl, seedvr2, wan
from zerowaste_vae.engine.families.minimax_h3.running.plans import Own
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.network.tiles import grid
from zerowaste_vae.engine.options import DEFAULTS, unavailable
from zerowaste_vae.engine.planning.plan import why_none
from zerowaste_vae.engine.runtime.context import ExecutionContext
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.runtime.parking import Parking
from zerowaste_vae.engine.vae import VideoVAE

from ...execution.faults import forget_others, leftovers
from ...families.small import SMALL
from .fake_graph import FakeClock, FakeGraph

OFF = DEFAULTS.switched(off=["cuda_graphs"])
CPU = torch.device("cpu")




@pytest.fixture(autouse=True)
def fake(monkeypatch, vae):
    """Graphs on a CPU, recorded whenever a kind of chunk comes again; nothing is left behind."""
    forget_others()
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    monkeypatch.setattr(graphs, "CudaGraph", FakeGraph)
    monkeypatch.setattr(graphs, "Clock", FakeClock)
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    monkeypatch.setattr(runs, "why_not_on", lambda _: None)
    monkeypatch.setattr(
        "zerowaste_vae.engine.execution.core.unavailable", lambda *args: unavailable(*args) | {"cuda_graphs": None}
    )
    monkeypatch.setattr(FakeGraph, "made", [])
    monkeypatch.setattr(FakeGraph, "failing", set())
    vae._fused.runs = runs.Runs(True)
    yield
    KEPT.release()
    assert leftovers() == []


def build(model, architecture):
    """A VAE that takes a CPU's reference operators for kernels, and the same one without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        vae = VideoVAE(model.requires_grad_(False), architecture, "fp32", torch.float32, CPU)
        return vae, vae.with_options(OFF)


@pytest.fixture(scope="module")
def both(seed_model):
    model = seedvr2.ARCHITECTURE.build(seedvr2.Config((8, 8, 16, 16), (8, 8, 16, 16), 16, 4))
    seed_model(model, 3)
    return build(model, seedvr2.ARCHITECTURE)


@pytest.fixture(scope="module")
def vae(both):
    return both[0]


@pytest.fixture(scope="module")
def plain(both):
    return both[1]


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def wan_vaes(request, seed_model):
    config, architecture = {
        "2.1": (wan.Config((8, 8, 16, 16), (8, 16, 16, 16)), wan.WAN21),
        "2.2": (wan.Config((8, 16, 32, 32), (8, 16, 32, 32), 48, 2), wan.WAN22),
    }[request.param]
    model = wan.WAN21.build(config)
    seed_model(model, 3)
    return build(model, architecture)


def replayed(vae):
    return vae._fused.runs.replayed


def reason(vae):
    return dict(vae.last_report.off).get("cuda_graphs")


@pytest.mark.parametrize(("latents", "chunk", "counts"), [
    (1, 1, [(0, 1), (1, 1), (1, 1)]),
    (5, 1, [(2, 5), (5, 5)]),
    (5, 2, [(0, 3), (3, 3)]),
])  # fmt: skip
def test_decodes_are_equal(vae, plain, noise, latents, chunk, counts):
    clips = [noise(1, 16, latents, 1, 2, seed=seed) for seed in range(2)]
    expected = [plain.decode(z, chunk=chunk) for z in clips]
    for i, count in enumerate(counts):
        assert torch.equal(vae.decode(clips[i % 2], chunk=chunk), expected[i % 2])
        assert replayed(vae) == count
    assert f"{count[0]} of {count[1]} chunks replayed" in vae.last_report.mode


def test_encodes_are_equal(vae, plain, noise):
    for frames in (1, 17):
        video = noise(frames, 9, 17, 3).sigmoid()
        expected = plain.encode(video)
        for _ in range(3):
            assert torch.equal(vae.encode(video), expected)
        assert replayed(vae)[0] == replayed(vae)[1]


def test_wan_too(wan_vaes, noise):
    vae, plain = wan_vaes
    z = noise(1, vae.latent_channels, 3, 1, 1)
    video = noise(9, vae.spatial + 3, vae.spatial, 3).sigmoid()
    expected = plain.decode(z, chunk=1), plain.encode(video)
    for _ in range(2):
        assert torch.equal(vae.decode(z, chunk=1), expected[0])
    assert replayed(vae) == (3, 3)
    for _ in range(2):
        assert torch.equal(vae.encode(video), expected[1])
    assert replayed(vae)[0] == replayed(vae)[1]
    vae.release()


def test_batches_and_histories_from_other_slots(vae, plain, noise):
    """The tail of a clip leaves the rings anywhere; the next clip, and the next call, begin at slot 0."""
    z = noise(2, 16, 3, 1, 1)
    expected = plain.decode(z, chunk=2)
    for _ in range(2):
        assert torch.equal(vae.decode(z, chunk=2), expected)
    assert replayed(vae) == (4, 4)


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode(vae, plain, noise, first):
    """A host runs nodes in inference mode, a script does not: the memory and the graphs of one serve the other."""
    z, video = noise(1, 16, 1, 1, 1), noise(1, 8, 8, 3).sigmoid()
    expected, latent = plain.decode(z), plain.encode(video)
    for call, result in ((lambda: vae.decode(z), expected), (lambda: vae.encode(video), latent)):
        for mode in (first, first, not first, first):
            with torch.inference_mode(mode):
                assert torch.equal(call(), result)
        assert replayed(vae) == (1, 1) and reason(vae) is None


@pytest.mark.parametrize("drop", ["release", "kept", "another size", "another VAE", "options"])
def test_what_is_kept_is_dropped(both, noise, drop):
    """Memory stays between calls until someone needs it, and results are the same with and without it."""
    vae, plain = both
    z, other = noise(1, 16, 1, 1, 1), noise(1, 16, 1, 1, 2)
    expected = plain.decode(z)
    for _ in range(2):
        vae.decode(z)
    held = KEPT.nbytes(CPU)
    assert 0 < held == vae._fused.runs._recorder._latest.nbytes
    before = vae._held("decoder")
    {
        "release": vae.release,
        "kept": KEPT.release,
        "another size": lambda: vae.decode(other),
        "another VAE": lambda: plain.decode(other),
        "options": lambda: vae.with_options(OFF),
    }[drop]()
    assert KEPT.nbytes(CPU) == 0 or (drop == "another size" and KEPT.nbytes(CPU) != held)
    assert drop == "another size" or len(leftovers()) == 0
    assert vae._held("decoder") <= before - (held if drop != "another size" else 0)
    for _ in range(2):
        assert torch.equal(vae.decode(z), expected)


def test_large_memory_is_not_kept(vae, plain, noise, monkeypatch):
    monkeypatch.setattr(graph_rule, "KEPT_BYTES", 1000)
    z = noise(1, 16, 1, 1, 1)
    expected = plain.decode(z)
    for _ in range(2):
        assert torch.equal(vae.decode(z), expected)
    assert replayed(vae) == (1, 1)
    assert KEPT.nbytes(CPU) == 0 and leftovers() == []


def test_cancelled_calls_keep_nothing(vae, plain, noise):
    z, done = noise(1, 16, 5, 1, 1), []
    expected = plain.decode(z, chunk=1)
    with pytest.raises(Cancelled):
        vae.decode(z, chunk=1, progress=lambda n, _: done.append(n), cancel=lambda: len(done) >= 4)
    assert len(FakeGraph.made) == 1 and KEPT.nbytes(CPU) == 0 and leftovers() == []
    assert torch.equal(vae.decode(z, chunk=1), expected)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("trouble", ["record", "replay"])
def test_failures(vae, plain, noise, monkeypatch, trouble, kind):
    """Failures change nothing. One for want of memory holds for its call: others may have freed some by the next."""
    z = noise(1, 16, 1, 1, 1)
    expected = plain.decode(z)
    monkeypatch.setattr(FakeGraph, "failing", {trouble})
    monkeypatch.setattr(FakeGraph, "error", kind)
    for _ in range(3):
        assert torch.equal(vae.decode(z), expected)
    assert reason(vae) == f"recording failed: injected: {trouble}"
    full = kind is torch.OutOfMemoryError
    assert len(FakeGraph.made) == (2 if full else 1) and KEPT.nbytes(CPU) == 0  # the first call is timed
    assert not vae.last_report.events["oom_retries"]
    monkeypatch.setattr(FakeGraph, "failing", set())
    assert torch.equal(vae.decode(z), expected)
    assert replayed(vae) == (1, 1) if full else reason(vae) == f"recording failed: injected: {trouble}"


def test_other_kernels_replay_nothing(vae, plain, noise, monkeypatch):
    """A graph launches the kernels that it was recorded with; the VAE's may be others by the next call."""
    z = noise(1, 16, 1, 1, 1)
    expected = plain.decode(z)
    for kernels, done, graphs_made in (("A", 0, 0), ("A", 1, 1), ("A", 1, 1), ("C", 0, 1), ("C", 1, 2), ("A", 1, 3)):
        monkeypatch.setattr(runs, "target", lambda device, kernels=kernels: kernels)
        assert torch.equal(vae.decode(z), expected)
        assert replayed(vae) == (done, 1) and len(FakeGraph.made) == graphs_made


def test_why_there_are_none(vae, plain, noise):
    plain.decode(noise(1, 16, 1, 1, 1))
    assert reason(plain) == "switched off"
    vae.decode(noise(1, 16, 1, 1, 1))
    assert reason(vae) == "no chunk came a second time"
    plan = vae.plan_decode(4, 1, 1)
    banded = replace(plan, parking=Parking(None, 0))
    parked = replace(banded, host_bytes=1)
    small = replace(plan, steps=Steps(2, 4))
    blended = replace(plan, grid=grid(16, 16, 96, 32, 8))
    assert why_none(True, plan) is None
    assert why_none(True, parked) == "histories come from host memory and go back in every chunk"
    assert why_none(True, banded) == "frames go through in bands"
    streamed = replace(plan, own=Own(1, (1, 1), 1, 2))
    assert why_none(True, streamed) == "weights come from host memory in every chunk"
    assert why_none(True, small) == "a chunk's frames go through in several steps"
    assert why_none(True, blended) == "blended tiles are not recorded"


def test_busy_gpus_and_short_clips_record_nothing(vae, plain, noise, monkeypatch):
    monkeypatch.setattr(graphs, "pays", graph_rule.pays)
    monkeypatch.setattr(FakeClock, "span", 1e9)
    z = noise(1, 16, 4, 1, 1)
    expected = plain.decode(z, chunk=1)
    for _ in range(2):
        assert torch.equal(vae.decode(z, chunk=1), expected)
    assert "keeps the GPU busy for 1000000000.0 ms" in reason(vae)
    assert FakeGraph.made == [] and KEPT.nbytes(CPU) == 0


def test_idle_gpus_record_when_it_pays(vae, plain, noise, monkeypatch):
    """A call by itself: only where enough is left of it. Calls that follow each other: what stays from one to the
    next."""
    monkeypatch.setattr(graphs, "pays", graph_rule.pays)
    monkeypatch.setattr(FakeClock, "span", 0.0)
    z = noise(1, 16, 4, 1, 1)
    expected = plain.decode(z, chunk=1)
    counts = []
    for _ in range(3):
        assert torch.equal(vae.decode(z, chunk=1), expected)
        counts.append(replayed(vae)[0])
    # The third kind comes twice: it is compiled and timed in the first call, the others are timed in the second one.
    assert counts == [0, 2, 4]
    assert KEPT.nbytes(CPU) > 0


@pytest.mark.parametrize(("latents", "busy", "counts", "kept"), [
    (1, 9.0, [0, 0, 1, 1], True),
    (1, 14.0, [0, 0, 1, 0], False),  # found out by the first replay
    (4, 9.0, [0, 0, 0, 0], False),  # the GPU makes up for it while the host launches the next chunk
])  # fmt: skip
def test_a_call_of_one_chunk(vae, plain, noise, monkeypatch, latents, busy, counts, kept):
    """Launched in 10 ms and done after 15: calls of one chunk are recorded if the GPU waits, others are not."""
    ticks = itertools.count()
    monkeypatch.setattr(graphs, "pays", graph_rule.pays)
    monkeypatch.setattr(graph_rule, "perf_counter", lambda: 0.01 * next(ticks))
    monkeypatch.setattr(FakeClock, "span", 15.0)
    monkeypatch.setattr(FakeGraph, "busy", busy)
    z = noise(1, 16, latents, 1, 1)
    expected = plain.decode(z, chunk=1)
    for count in counts:
        assert torch.equal(vae.decode(z, chunk=1), expected)
        assert replayed(vae) == (count, latents)
    assert (KEPT.nbytes(CPU) > 0) is kept


def test_pictures(noise):
    """Flux's pictures, one a call and three a call, each twice: launched, then replayed."""
    made, plain = build(kl.FLUX.build(SMALL["flux"]), kl.FLUX)
    with torch.no_grad():
        for p in made.model.parameters():
            p.copy_(noise(*p.shape, seed=p.numel()) * 0.2)
    for count in (1, 3):
        z = noise(count, 16, 2, 3)
        expected = plain.decode(z)
        for _ in range(2):
            assert torch.equal(made.decode(z), expected)
        assert replayed(made)[0] == replayed(made)[1] > 0
    made.release()


def test_memory_for_another_thread(vae, plain, noise, monkeypatch):
    """As another VAE's run does when memory is short."""
    z, freeing, free = noise(1, 16, 3, 2, 3), threading.Event(), ExecutionContext.free
    frames = plain.decode(z, chunk=1)

    def slowly(run):
        freeing.set()
        time.sleep(0.3)  # the next call would be in its first chunk
        free(run)

    for _ in range(2):
        assert torch.equal(vae.decode(z, chunk=1), frames)
    assert KEPT.nbytes(CPU)
    monkeypatch.setattr(ExecutionContext, "free", slowly)
    with ThreadPoolExecutor(1) as pool:
        freed = pool.submit(KEPT.release)
        assert freeing.wait(10)
        assert torch.equal(vae.decode(z, chunk=1), frames)
        freed.result(10)
