"""Runs of several threads: each gets its own frames and report, and the user's settings survive them all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.execution.components import FusedComponents
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.runtime.kept import KEPT, Kept
from zerowaste_vae.engine.runtime.scope import scoped_math
from zerowaste_vae.nodes.panel import Question, answer

from ..runtime.test_scope import CUDA, cudnn, product, settings
from .faults import forget_others, leftovers


def in_threads(*works):
    """Run all at once; their results."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(work) for work in works]]


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_out", ["the first", "the second"])
def test_settings(first_out):
    """Overlapping runs leave the users settings."""
    before, inside = settings(), []
    entered, both, left = threading.Event(), threading.Barrier(2), threading.Event()

    def run(number, **wishes):
        if number:
            entered.wait(10)
        with scoped_math(CUDA, **wishes):
            entered.set()
            both.wait(10)
            inside.append(settings())
            both.wait(10)
            if (number == 0) != (first_out == "the first"):
                left.wait(10)
        left.set()

    in_threads(lambda: run(0, tf32=True, cudnn_benchmark=True), lambda: run(1))
    assert {k: v for k, v in settings().items() if k != "grad"} == {k: v for k, v in before.items() if k != "grad"}
    # One wants exact products, the other would take faster ones: both get exact ones.
    assert inside[0]["products"] in ("ieee", False) and inside[0]["benchmark"] is False
    assert inside[0] == inside[1]


def test_faster_value():
    """The faster value comes back when the exact run is over."""
    with scoped_math(CUDA, tf32=True, cudnn_benchmark=True):
        with scoped_math(CUDA):
            assert settings()["products"] in ("ieee", False) and not cudnn.benchmark
        assert settings()["products"] in ("tf32", True) and cudnn.benchmark


def test_what_the_user_sets_during_a_run_stays():
    before = cudnn.benchmark
    try:
        with scoped_math(CUDA, cudnn_benchmark=before):
            cudnn.benchmark = not before
        assert cudnn.benchmark is not before
    finally:
        cudnn.benchmark = before


def test_panel_question(monkeypatch):
    """It is answered in a thread of its own while others compute."""
    written = []
    for holder in (type(product), type(cudnn.conv) if hasattr(cudnn, "conv") else type(cudnn)):
        put = holder.__setattr__
        monkeypatch.setattr(holder, "__setattr__", lambda *a, put=put: written.append(a[1:]) or put(*a))
    kept = product.allow_fp16_reduced_precision_reduction
    product.allow_fp16_reduced_precision_reduction = kept
    assert written.pop() == ("allow_fp16_reduced_precision_reduction", kept)  # they are seen
    for off in ("flash_attention", "triton_fusion,flash_attention"):
        size = {"width": "128", "height": "128", "frames": "5"}
        question = Question.parse({"model": "seedvr2_ema_vae", **size, "off": off})
        assert answer(question, Machine(torch.device("cpu"), None, 8 << 30))["fits"]
    plain = DEFAULTS.switched(off=["flash_attention"])
    config = Config((16,) * 4, (16,) * 4, 16, 4)
    FusedWalk(ARCHITECTURE, config, torch.float16, plain).sizes("decoder", 1, 4, 16, 16, torch.float32)
    assert written == []


# -- one VAE, two calls ------------------------------------------------------------------------------------------------


@pytest.fixture
def fused(vae_file, monkeypatch):
    forget_others()
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    yield load(vae_file, device="cpu")
    assert leftovers() == []


def test_threads_that_share_a_vae(fused, noise):
    """Both are in the middle of a clip at the same time, one of them twice; each gets its own frames and report."""
    clips = noise(1, 16, 3, 2, 3), noise(1, 16, 2, 3, 2, seed=1)
    expected = [fused.decode(z, chunk=1) for z in clips]
    meet = threading.Barrier(2)

    def run(z):
        out = fused.decode(z, chunk=1, progress=lambda done, _: meet.wait(60) if done <= 2 else None)
        return out, fused.last_report

    for result, z, frames in zip(in_threads(*(lambda z=z: run(z) for z in clips)), clips, expected, strict=True):
        out, report = result
        assert torch.equal(out, frames)
        assert report.clip == tuple(frames.shape[:4]) and report.complete, (z.shape, report.clip)
    assert not fused._busy.locked()


def test_overlapping_calls(fused, noise, monkeypatch):
    """Neither packed weights nor runs with their notes; the next call alone is the VAE's own again."""
    used, half = [], FusedComponents.half
    monkeypatch.setattr(FusedComponents, "half", lambda halves, *a: used.append((halves, halves.runs)) or half(halves,
    *a))
    z = noise(1, 16, 2, 1, 1)
    frames = fused.decode(z, chunk=1)
    again = []
    fused.decode(z, chunk=1, progress=lambda *_: again or again.append(fused.decode(z, chunk=1)))
    assert torch.equal(again[0], frames) and torch.equal(fused.decode(z, chunk=1), frames)
    own, outer, inner, after = used
    assert own == outer == after and inner[0] is not own[0] and inner[1] is not own[1]


def test_two_vaes_and_a_third_thread_that_frees(vae_file, fused, noise):
    other, z = load(vae_file, device="cpu"), noise(1, 16, 2, 2, 2)
    video = noise(5, 16, 16, 3).sigmoid()
    frames, latent = fused.decode(z, chunk=1), other.encode(video)
    stop = threading.Event()

    def free():
        while not stop.is_set():
            fused.release()
            KEPT.release()
            stop.wait(0.001)

    def work():
        try:
            decoded = lambda: [fused.decode(z, chunk=1) for _ in range(3)]  # noqa: E731
            encoded = lambda: [other.encode(video) for _ in range(3)]  # noqa: E731
            return in_threads(decoded, encoded)
        finally:
            stop.set()

    (decoded, encoded), _ = in_threads(work, free)
    assert all(torch.equal(out, frames) for out in decoded) and all(torch.equal(out, latent) for out in encoded)


def test_kept_memory_goes_to_one_of_two_threads():
    class Holder:
        nbytes, device, freed = 1, torch.device("cpu"), 0

        def free(self):
            self.freed += 1

    class Overtaken:
        """A lock that lets another thread in before its own, once."""

        def __init__(self, lock, other):
            self.lock, self.other = lock, other

        def __enter__(self):
            other, self.other = self.other, None
            if other is not None:
                in_threads(other)
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    kept, holder = Kept(), Holder()
    kept.keep(holder)
    kept._lock = Overtaken(kept._lock, kept.release)
    assert not kept.take(holder.device, holder) and holder.freed == 1
    kept.keep(holder)
    assert kept.take(holder.device, holder) and not kept.take(holder.device, holder) and holder.freed == 1


