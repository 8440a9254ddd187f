"""Page-locked memory: refused, it makes a run slower, not wrong; a block has one user; idle blocks count as free."""

import logging
import threading
import time
from functools import partial

import pytest
import torch
from zerowaste_vae.engine import log
from zerowaste_vae.engine.execution.results import Landed, Whole
from zerowaste_vae.engine.execution.staging import StagedReader, StagedWriter
from zerowaste_vae.engine.planning import budget as memory
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.runtime import pinned
from zerowaste_vae.engine.runtime.pinned import PinnedPool
from zerowaste_vae.engine.system import devices

GPU = torch.device("cuda", 0)


class Driver:
    """A CUDA that refuses to lock pages and, as the real one does, has the next launch raise the error."""

    def __init__(self):
        self.pending = False

    def cudaHostRegister(self, *_):
        self.pending = True
        return 2

    def launch(self):
        pending, self.pending = self.pending, False
        if pending:
            raise RuntimeError("CUDA error: out of memory")


class Scalar:
    def __init__(self, driver):
        self.driver = driver

    def add_(self, _):
        self.driver.launch()


@pytest.fixture
def driver(monkeypatch):
    driver, empty = Driver(), torch.empty

    def make(*size, device=None, pin_memory=False, **options):
        if pin_memory:
            driver.pending = True
            raise RuntimeError("CUDA error: out of memory")
        return Scalar(driver) if device == "cuda" else empty(*size, device=device, **options)

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "a stream")
    monkeypatch.setattr(devices, "_uploads", {})
    monkeypatch.setattr(torch.cuda, "Event", lambda: pytest.fail("there is nothing to wait for"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda _: make(0, pin_memory=True))
    monkeypatch.setattr(log, "_said", set())
    return driver


def test_a_refused_lock_leaves_no_error_behind(driver, caplog):
    pool = PinnedPool()
    with caplog.at_level(logging.WARNING):
        blocks = [pool.take(100_000), pool.take(300_000)]
        assert not driver.pending
        driver.launch()  # what follows is not blamed
    assert [line.getMessage().count("page-lock") for line in caplog.records] == [1]
    assert "ulimit" in caplog.text
    blocks[0].fill_(7)
    for block in blocks:
        pool.give(block)
    pool.release()
    assert pool.nbytes == 0


def test_copies_go_on_through_ordinary_memory(driver, caplog, noise):
    out, done = torch.zeros(1, 4, 2, 3, 3), []
    pixels = noise(4, 2, 3, 3)
    finish = lambda *given: done.append(given)  # noqa: E731
    with caplog.at_level(logging.WARNING), StagedWriter(Whole(out), 2, GPU, finish) as writer:
        writer.write(0, 0, pixels[:2], torch.tensor(1.0))
        writer.write(0, 2, pixels[2:], torch.tensor(2.0))
    assert torch.equal(out[0], pixels) and done == [(0, 0, 2, 1.0), (0, 2, 2, 2.0)]
    reader = StagedReader(GPU)
    for part in pixels.split(2):
        read = reader.read(Upload(part))
        assert torch.equal(read, part)
    assert not driver.pending
    assert len(caplog.records) == 1


def test_more_frames_than_a_buffer_has(driver, noise):
    """They go through it one part after the other."""
    out, done, pixels = torch.zeros(1, 5, 2, 3, 3), [], noise(5, 2, 3, 3)
    with StagedWriter(Whole(out), 2, GPU, lambda *given: done.append(given)) as writer:
        writer.write(0, 0, pixels, torch.tensor(1.0))
    assert torch.equal(out[0], pixels) and done == [(0, 0, 2, 1.0), (0, 2, 2, 1.0), (0, 4, 1, 1.0)]


@pytest.mark.parametrize("kind, touched", [(Whole, 4), (partial(Landed, part=0), 0)])
def test_memory_is_touched_while_waiting(noise, monkeypatch, kind, touched):
    """While results are on their way, their memory and that of later ones is written to, once, but not what other parts
    may have written."""
    slow = iter([False] * 7)

    class Event:
        def record(self, stream):
            pass

        def query(self):
            return next(slow, True)

        def synchronize(self):
            pass

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "a stream")
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    out, pixels, seen = torch.full((1, 6, 2, 3, 3), 7.0), noise(6, 2, 3, 3), []
    results = kind(out, 1)

    def landed(*_):
        seen.append(int((out == 0).all(4).all(3).all(2).sum()))

    with StagedWriter(results, 2, GPU, landed) as writer:
        for first in (1, 3, 5):
            writer.write(0, first, pixels[first - 1 : first + 1], torch.zeros(()))
    assert torch.equal(out[0], pixels) and seen[0] == touched


class Upload(torch.Tensor):
    """A host tensor of which a GPU's copy is itself."""

    def to(self, device, **_):
        assert device == GPU
        return self.as_subclass(torch.Tensor)


class Slow(list):
    """Whoever looks through it is overtaken."""

    def __iter__(self):
        for item in list.__iter__(self):
            time.sleep(0.05)
            yield item


def test_two_threads_never_get_one_block():
    pool = PinnedPool()
    pool.give(pool.take(1000))
    pool._idle = Slow(pool._idle)
    taken, start = [], threading.Barrier(2)

    def take():
        start.wait()
        taken.append(pool.take(1000).data_ptr())

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 2


def test_pool_counts_as_free(monkeypatch):
    """The same parked call is planned the same way a second time."""
    free, pool = 10 << 20, PinnedPool()  # other tests' runs may not be collected yet
    monkeypatch.setattr(memory, "POOL", pool)
    monkeypatch.setattr(memory, "available_ram", lambda: free - pool.nbytes)
    here = partial(Machine.bare, GPU, None)
    before = here().half_ram
    assert before == free // 2
    block = pool.take(4 << 20)
    assert here().half_ram == (free - (4 << 20)) // 2
    pool.give(block)
    assert here().half_ram == before
    pool.release()


def test_blocks_serve_in_every_mode():
    pool = PinnedPool()
    with torch.inference_mode():
        block = pool.take(10)
    pool.give(block)
    assert pool.take(10).fill_(1)[0] == 1




def test_release(vae, monkeypatch):
    """Release gives torchs own page locked memory back."""
    emptied = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(True), raising=False)
    vae.release()
    assert not emptied  # without CUDA there is none
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    vae.release()
    assert emptied == [True]
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    vae.release()


def test_other_recording(monkeypatch):
    """torch refuses to empty its cache, and CUDA breaks the recording off, while launches are recorded."""
    recording, seen = threading.Event(), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(recording.is_set()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: seen.append(recording.is_set()))
    works = (devices.empty_device_cache, lambda: devices.synchronize(GPU))
    threads = [threading.Thread(target=work) for work in works]
    with devices.RECORDING:
        recording.set()
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        recording.clear()
    for thread in threads:
        thread.join()
    assert seen == [False, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("given", ["whole", "channels behind", "every other", "picture"])
def test_sent(given, monkeypatch):
    """In pieces of which the last is short, in the order that the memory has."""
    monkeypatch.setattr(pinned, "SENT", 1 << 12)
    x = torch.rand(1, 3, 5, 33, 41, generator=torch.Generator().manual_seed(0)).half()
    x = {"whole": x, "channels behind": x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3),
         "every other": x[:, :, ::2], "picture": x[:, :, 0]}[given]  # fmt: skip
    made = pinned.sent(x, torch.device("cuda"))
    assert made.is_cuda and torch.equal(made.cpu(), x)
