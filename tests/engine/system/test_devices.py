"""A run's events, streams and launches belong to its device, whatever the caller's current one is."""

import gc
import threading
from collections import defaultdict, deque
from pathlib import Path

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.execution.results import Whole
from zerowaste_vae.engine.execution.staging import StagedReader, StagedWriter
from zerowaste_vae.engine.loader import placement
from zerowaste_vae.engine.runtime.scope import scoped_math
from zerowaste_vae.engine.system import devices

SECOND = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch):
    """Two GPUs that only know which of them is a thread's current one; that is 0 at first."""
    here = threading.local()

    class Device:
        def __init__(self, device):
            self.index = torch.device(device).index

        def __enter__(self):
            self.before, here.index = now(), self.index

        def __exit__(self, *_):
            here.index = self.before

    def now():
        return getattr(here, "index", 0)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", now)
    return now


def test_current_device(current):
    """Its device is current inside and the callers after."""
    with pytest.raises(KeyError), scoped_math(SECOND):
        assert current() == 1
        raise KeyError
    assert current() == 0


def test_the_raw_pair_and_measuring_too(current, vae_file, noise, monkeypatch):
    """All that computes is inside the scope. A VAE on a CPU is told that it is on the second GPU."""
    vae, seen = load(vae_file, device="cpu"), []
    vae._plain.frames = lambda *_: [seen.append(current()) or [noise(1, 3, 1, 8, 8)]]
    vae._plain.moments = lambda *_: [seen.append(current()) or noise(1, 32, 1, 1, 1)]
    monkeypatch.setattr(vae._mixed, "settle", lambda *_: seen.append(current()) or vae._mixed.policy("decoder"))
    monkeypatch.setattr(vae, "fused", lambda: vae._fused)
    vae.device = SECOND
    vae.decode_raw(noise(1, 16, 1, 1, 1))
    vae.encode_raw(noise(1, 3, 1, 8, 8))
    vae._settle("decoder", list)
    worker = threading.Thread(target=vae.decode_raw, args=(noise(1, 16, 1, 1, 1),))
    worker.start()
    worker.join()
    assert seen == [1, 1, 1, 1] and current() == 0


def test_waiting(current, noise, monkeypatch):
    """Also where somebody has changed the current device meanwhile: the event follows the copy's stream."""
    recorded = []

    class Event:
        def record(self, stream=None):
            recorded.append(stream or f"stream of {current()}")

        def query(self):
            return True

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device.index}")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    out = torch.zeros(1, 2, 2, 3, 3)
    with StagedWriter(Whole(out), 1, SECOND, lambda *_: None) as writer:
        for frame in range(2):
            writer.write(0, frame, noise(1, 2, 3, 3), torch.zeros(()))
    assert recorded == ["stream of 1", "stream of 1"]


def test_upload_stream(current, monkeypatch):
    """torch keeps the memory of finished copies for the stream that they were on: with a stream for each call, every
    call of an encode at 1280x720 reserved its chunks' frames anew."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or len(made))
    monkeypatch.setattr(devices, "_uploads", {})
    streams = [StagedReader(SECOND)._stream for _ in range(3)]
    worker = threading.Thread(target=lambda: streams.append(StagedReader(SECOND)._stream))
    worker.start()
    worker.join()
    assert streams == [1] * 4 and made == [SECOND]
    with torch.cuda.device(SECOND):
        assert StagedReader(torch.device("cuda"))._stream == 1
    assert StagedReader(torch.device("cuda", 0))._stream == 2
    assert StagedReader(SECOND, ahead=False)._stream is None


def test_copy_streams(monkeypatch):
    """Copies have another priority than kernels; runs at the same time have streams of their own."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append((device, priority)) or len(made))
    monkeypatch.setattr(devices, "_pairs", defaultdict(deque))
    first, other = devices.lend_copies(SECOND), devices.lend_copies(SECOND)
    devices.return_copies(SECOND, first)
    assert devices.lend_copies(SECOND) == first and not set(first) & set(other)
    assert made == [(SECOND, -1)] * 4


def test_streams_of_threads(monkeypatch):
    """Several GPUs have threads for each call: with streams of their own, every call would reserve its memory anew."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or len(made))
    monkeypatch.setattr(devices, "_idle", defaultdict(deque))
    monkeypatch.setattr(devices, "_own", devices._Own())

    def used(count):
        """By so many threads at once."""
        together, streams = threading.Barrier(count), []

        def work():
            streams.extend(devices._own.stream(SECOND) for _ in range(2))
            together.wait(10)

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threads.clear()
        gc.collect()
        return sorted(streams)

    assert used(2) == [1, 1, 2, 2]
    assert used(1) in ([1, 1], [2, 2]) and len(made) == 2
    assert used(3) == [1, 1, 2, 2, 3, 3]


def test_no_counters_before_the_first_use(monkeypatch):
    """torch has none then."""
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    assert devices.counters(SECOND) == (0, 0, 0, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_counters_are_torchs():
    there, cuda = torch.empty(3 << 20, device="cuda"), torch.cuda
    torch.empty(5 << 20, device="cuda")
    expected = (cuda.memory_allocated(), cuda.memory_reserved(), cuda.max_memory_allocated(),
                cuda.max_memory_reserved(), cuda.memory_stats()["num_ooms"])  # fmt: skip
    assert devices.counters(there.device) == expected and expected[0] >= there.nbytes


def test_number(current, monkeypatch):
    """A gpu without a number is the one current at loading."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with torch.cuda.device(SECOND):
        assert placement("auto", "cuda") == placement("auto", None) == SECOND
    assert placement("auto", "cuda:1") == SECOND
    assert placement("auto", "cpu") == torch.device("cpu")


def test_the_cache_is_emptied_in_one_place():
    """Not beside another thread's recording; the others are processes and measurements of their own."""
    root = Path(devices.__file__).parents[2]
    found = {str(path.relative_to(root)) for folder in ("engine", "nodes") for path in (root / folder).rglob("*.py")
             if "cuda.empty_cache()" in path.read_text(encoding="utf-8")}  # fmt: skip
    assert {Path(name).as_posix() for name in found} == {
        "engine/system/devices.py", "engine/extras/tuning/worker.py", "engine/extras/bench/calls.py"}  # fmt: skip
