"""On a real GPU: replayed chunks have the bits of launched ones, whatever happened before, during or between them."""

import gc
import math
import os
import threading
from dataclasses import replace

import pytest
import torch
from zerowaste_vae import Cancelled, demo_vae_path, load
from zerowaste_vae.engine.extras.graphs import graph_rule, graphs
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.runtime import context as run_module
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.system.memory import GIB

from ...gpu_models import make, reserved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("seedvr2-tiny", "seedvr2", "wan2.1-tiny", "wan2.2-tiny")
OFF = DEFAULTS.switched(off=["cuda_graphs"])
#: Name -> the precision its architecture is made for.
MODELS = {"seedvr2-tiny": "fp16", "seedvr2": "fp16", "wan2.1-tiny": "bf16", "wan2.2-tiny": "bf16"}


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def vae_of(made, monkeypatch):
    """vae_of(name): its chunks are recorded whatever the host's speed. Nothing stays behind."""
    monkeypatch.setattr(graphs, "pays", lambda *_: True)

    def get(name):
        if name not in made:
            made[name] = make(name, MODELS.get(name, "bf16"))
            assert made[name].fused() is not None, name
        return made[name]

    yield get
    for vae in made.values():
        vae.on_pressure = None
        vae.release()
    assert KEPT.nbytes(torch.device("cuda")) == 0
    assert torch.cuda.is_current_stream_capturing() is False


@pytest.fixture
def tiny(vae_of):
    return vae_of("seedvr2-tiny")


def replayed(vae):
    return vae._fused.runs.replayed


def latent_of(vae, noise, frames, height, width, seed=0):
    return noise(1, vae.latent_channels, (frames - 1) // 4 + 1, height, width, seed=seed)


def video_of(vae, noise, frames, height, width, seed=0):
    s = vae.spatial
    return (noise(frames, s * height + 5, s * width + 3, 3, seed=seed) * 50 + 128).clamp(0, 255).byte()


@pytest.mark.parametrize("frames", [1, 37])
@pytest.mark.parametrize("name", MODELS)
def test_decode_and_encode_are_equal(vae_of, noise, name, frames):
    """Two clips in turn, two calls each: launched, recorded, replayed. 37 frames are a start, a chunk and a tail."""
    vae = vae_of(name)
    plain = vae.with_options(OFF)
    clips = [latent_of(vae, noise, frames, 9, 7, seed) for seed in (1, 2)]
    videos = [video_of(vae, noise, frames, 9, 7, seed) for seed in (1, 2)]
    for work, inputs in (("decode", clips), ("encode", videos)):
        expected = [getattr(plain, work)(x) for x in inputs]
        assert not torch.equal(expected[0], expected[1])
        for call in range(2):
            for x, right in zip(inputs, expected, strict=True):
                assert torch.equal(getattr(vae, work)(x), right), (work, call)
        count, chunks = replayed(vae)
        assert count == chunks == math.ceil(((frames - 1) // 4 + 1) / 4)
        assert "CUDA graphs" in vae.last_report.mode


def test_pictures(vae_of, noise):
    """Flux's, small and of 1024x1024, whose memory large cards keep: what is stated holds for calls in a row."""
    others = reserved()
    vae = vae_of("flux")
    for side in (16, 128):
        z = noise(1, 16, side, side)
        vae.release()
        reserved()
        found = [vae.decode(z) for _ in range(5)]
        stated, most = vae.last_report.predicted_gb, (torch.cuda.max_memory_reserved() - others) / GIB
        print(f"{8 * side}: stated {stated:.3f} GB, reserved {most:.3f}, kept {KEPT.nbytes(vae.device) / GIB:.3f}")
        assert replayed(vae) == (1, 1) and "CUDA graphs" in vae.last_report.mode
        assert (KEPT.nbytes(vae.device) > 0) == (side == 16 or graph_rule.kept_bytes(vae.device) > 1.2 * GIB)
        assert most <= stated
        expected = vae.with_options(OFF).decode(z)
        assert all(torch.equal(frames, expected) for frames in found)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(5, 11), (16, 9)])
def test_within_one_call_and_in_batches(tiny, noise, height, width, chunk):
    z = noise(2, 16, 11, height, width)
    expected = tiny.with_options(OFF).decode(z, chunk=chunk, output="uint8")
    assert torch.equal(tiny.decode(z, chunk=chunk, output="uint8"), expected)
    assert 0 < replayed(tiny)[0] < replayed(tiny)[1]
    other = tiny.with_options(OFF).decode(z)
    assert torch.equal(tiny.decode(z), other)


def test_halves_take_turns_and_sizes_change(tiny, noise):
    plain = tiny.with_options(OFF)
    for _ in range(2):
        for size in ((6, 5), (7, 9)):
            z, video = latent_of(tiny, noise, 21, *size), video_of(tiny, noise, 21, *size)
            expected = plain.decode(z), plain.encode(video)
            for _ in range(2):
                assert torch.equal(tiny.decode(z), expected[0])
            for _ in range(2):
                assert torch.equal(tiny.encode(video), expected[1])


def test_release_gives_all_memory_back(vae_of, noise):
    vae = vae_of("seedvr2")
    z = latent_of(vae, noise, 29, 12, 9)
    vae.release()
    gc.collect()
    torch.cuda.empty_cache()
    plain = vae.with_options(OFF)
    expected = plain.decode(z)
    plain.release()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        assert torch.equal(vae.decode(z), expected)
    assert replayed(vae)[0] and KEPT.nbytes(vae.device) > 0
    vae.release()
    torch.cuda.empty_cache()
    print(f"left: {torch.cuda.memory_reserved() - reserved} bytes reserved")
    assert torch.cuda.memory_allocated() - allocated <= 33 << 20  # cuBLAS's workspace of one more stream
    for _ in range(3):
        assert torch.equal(vae.decode(z), expected)


def test_weights_that_change(tiny, noise):
    """Released weights are packed anew, and no graph reads the old ones."""
    z = latent_of(tiny, noise, 21, 6, 6)
    first = tiny.decode(z)
    for _ in range(2):
        tiny.decode(z)
    weight = tiny.model.decoder.up_blocks[3].resnets[1].conv2.weight
    kept = weight.clone()
    try:
        weight.mul_(1.5)
        tiny.release()
        changed = tiny.with_options(OFF).decode(z)
        assert not torch.equal(changed, first)
        for _ in range(3):
            assert torch.equal(tiny.decode(z), changed)
    finally:
        weight.copy_(kept)
        tiny.release()
    tiny.to("cpu").to("cuda")
    for _ in range(3):
        assert torch.equal(tiny.decode(z), first)


@pytest.mark.parametrize("trouble", ["injected", "real", "invalid"])
def test_recording_that_fails(tiny, noise, monkeypatch, trouble):
    """Out of memory, or something that cannot be recorded: launched as ever, said once, and well afterwards."""
    z = latent_of(tiny, noise, 45, 6, 7)
    expected = tiny.with_options(OFF).decode(z)
    conv3d = run_module.conv3d

    def failing(*args, **options):
        if torch.cuda.is_current_stream_capturing():
            if trouble == "injected":
                raise torch.OutOfMemoryError("injected")
            if trouble == "real":
                torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
        return conv3d(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "conv3d", failing)
        for _ in range(3):
            assert torch.equal(tiny.decode(z), expected)
        assert "recording failed" in dict(tiny.last_report.off)["cuda_graphs"]
        assert not tiny.last_report.events["oom_retries"]
    tiny.release()
    for _ in range(3):
        assert torch.equal(tiny.decode(z), expected)
    assert replayed(tiny)[0] == replayed(tiny)[1]


@pytest.mark.parametrize("asked_by", ["option", "environment"])
def test_kernels_in_turns(noise, monkeypatch, asked_by):
    """Sets of kernels round differently: each turn has the bits of a VAE that never ran another one, also where chunks
    are replayed, and the report names the set that ran."""
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    monkeypatch.delenv("ZEROWASTE_KERNELS", raising=False)
    z, turns = noise(1, 16, 5, 8, 8), ("A", "C", "triton")
    expected = {}
    for kernels in turns:
        fresh = load(demo_vae_path(), "fp16", "cuda").with_options(replace(DEFAULTS, kernels=kernels))
        expected[kernels] = fresh.decode(z, chunk=1), fresh.last_report.kernels
        fresh.release()
    if len({words for _, words in expected.values()}) < 2:
        pytest.skip("no two sets of kernels run here")
    vae, counts = load(demo_vae_path(), "fp16", "cuda"), []
    for kernels in (*turns, *turns):
        if asked_by == "option":
            vae.options = replace(vae.options, kernels=kernels)
        else:
            monkeypatch.setenv("ZEROWASTE_KERNELS", kernels)
        for _ in range(2):
            frames, words = vae.decode(z, chunk=1), vae.last_report.kernels
            assert torch.equal(frames, expected[kernels][0]) and words == expected[kernels][1], kernels
            counts.append(replayed(vae)[0])
    assert all(counts[1::2])
    vae.release()


def test_cancelled_between_replays(tiny, noise):
    z = latent_of(tiny, noise, 61, 6, 7)
    expected = tiny.with_options(OFF).decode(z)
    for _ in range(2):
        tiny.decode(z)
    done = []
    with pytest.raises(Cancelled):
        tiny.decode(z, progress=lambda n, _: done.append(n), cancel=lambda: len(done) >= 2)
    assert KEPT.nbytes(tiny.device) == 0
    for _ in range(3):
        assert torch.equal(tiny.decode(z), expected)


def test_memory_that_runs_out_between_replays(tiny, noise, monkeypatch):
    """An operator that found none is tried again, and what follows is recorded as ever."""
    z = latent_of(tiny, noise, 45, 6, 7)
    expected = tiny.with_options(OFF).decode(z, chunk=2)
    conv3d, launched = run_module.conv3d, []

    def failing(*args, **options):
        if not torch.cuda.is_current_stream_capturing():
            launched.append(1)
            if len(launched) == 10:
                raise torch.OutOfMemoryError("injected")
        return conv3d(*args, **options)

    monkeypatch.setattr(run_module, "conv3d", failing)
    tiny.release()
    tiny._fused.runs = type(tiny._fused.runs)(True)  # whose chunks have never come
    assert torch.equal(tiny.decode(z, chunk=2), expected)
    assert tiny.last_report.events["oom_retries"] == 1 and replayed(tiny)[0]
    for _ in range(2):
        assert torch.equal(tiny.decode(z, chunk=2), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_thread_that_has_launched_nothing(vae_of, noise, name):
    """It has no handles of cuBLAS and cuDNN yet when chunks come whose kinds the caller's thread has seen."""
    vae = vae_of(name)
    z, found = latent_of(vae, noise, 45, 6, 7), []
    expected = vae.decode(z, chunk=2)
    vae.release()
    thread = threading.Thread(target=lambda: found.append(vae.decode(z, chunk=2)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)
    assert replayed(vae)[0] and "cuda_graphs" not in dict(vae.last_report.off)


@pytest.mark.parametrize("recording", [math.inf, None, 0.0])
def test_the_rule_itself(vae_of, noise, monkeypatch, recording):
    """Recordings may differ with the machine; frames may not. Nothing pays, some pay, any gain pays."""
    monkeypatch.setattr(graphs, "pays", graph_rule.pays)
    if recording is not None:
        monkeypatch.setattr(graph_rule, "RECORDING", recording)
    vae = vae_of("seedvr2-tiny")
    vae._fused.runs = type(vae._fused.runs)(True)
    z = latent_of(vae, noise, 61, 6, 7)
    expected = vae.with_options(OFF).decode(z)
    for _ in range(4):
        assert torch.equal(vae.decode(z), expected)
        assert (vae._fused.runs.no_graphs is None) == (replayed(vae)[0] > 0)
    (notes,) = vae._fused.runs._recorder._notes.values()
    print(notes.times, replayed(vae), vae._fused.runs.no_graphs)
    assert all(t.launching > 0 and t.span > 0 for t in notes.times.values())
    if recording == math.inf:
        assert replayed(vae) == (0, 4) and KEPT.nbytes(vae.device) == 0
        assert len(notes.times) == 2 and "cuda_graphs" in dict(vae.last_report.off)


@pytest.mark.skipif("ZEROWASTE_INNER" in os.environ, reason="one allocator is enough in there")
def test_under_cuda_malloc_async(own_process):
    inner = own_process()
    print(inner.stdout[-3000:], inner.stderr[-2000:])
    assert inner.returncode == 0 and " passed" in inner.stdout


@pytest.mark.skipif("ZEROWASTE_INNER" not in os.environ, reason="only in the process with the other allocator")
def test_nothing_is_recorded_under_the_other_one(tiny, noise):
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    z = latent_of(tiny, noise, 45, 6, 7)
    expected = tiny.with_options(OFF).decode(z)
    for _ in range(3):
        assert torch.equal(tiny.decode(z), expected)
    assert replayed(tiny)[0] == 0 and "cudaMallocAsync" in dict(tiny.last_report.off)["cuda_graphs"]
