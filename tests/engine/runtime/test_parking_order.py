"""Check that copies and convolutions on their queues never meet in the same memory: without a GPU, by what each
queue has waited for. In program order, as a CPU runs it, everything is right anyway."""

import itertools
import random
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from zerowaste_vae.engine.runtime import parking as module
from zerowaste_vae.engine.runtime.parking import Parked, Parking
from zerowaste_vae.engine.runtime.pinned import POOL

CPU = torch.device("cpu")
QUEUES = weakref.WeakSet()


class Queue:
    """A CUDA stream that remembers how far it knows the others to be."""

    def __init__(self, name):
        self.name, self.at, self.knows = name, 0, {}
        QUEUES.add(self)

    def record_event(self):
        return {**self.knows, self: self.at}

    def wait_event(self, event):
        for queue, at in event.items():
            self.knows[queue] = max(self.knows.get(queue, 0), at)

    def synchronize(self):
        """The program waits, and with it whatever it queues later."""
        for queue in QUEUES:
            queue.knows[self] = self.at


class Gpu(TorchFunctionMode):
    """Follows what is read and written, and by which queue."""

    def __init__(self):
        super().__init__()
        self.main = self.now = Queue("main")
        self.done = []  # (first byte, end, written, queue, its count)
        self.beside = 0

    @contextmanager
    def stream(self, queue):
        before, self.now = self.now, queue
        yield
        self.now = before

    def touch(self, tensor, written):
        assert tensor.is_contiguous()
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        queue, kept = self.now, []
        for entry in self.done:
            a, b, wrote, other, at = entry
            known = other is queue or queue.knows.get(other, 0) >= at
            if a < end and first < b and (written or wrote):
                assert known, f"{queue.name} meets {other.name}"
            elif not known:
                self.beside += other is not queue
            if not (written and first <= a and b <= end):  # nothing can meet it but through this one
                kept.append(entry)
        queue.at += 1
        self.done = [*kept, (first, end, written, queue, queue.at)]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            self.touch(args[1], False)
            self.touch(args[0], True)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda device=None: made.now)
    monkeypatch.setattr(module.torch.cuda, "stream", made.stream)
    lent = []
    monkeypatch.setattr(module, "lend_copies", lambda device: lent.append(device) or (Queue("in"), Queue("out")))
    monkeypatch.setattr(module, "return_copies", lambda device, pair: lent.remove(device))
    yield made
    assert not lent
    POOL.release()


def layers(draw):
    """(key, plane, rows, frames, visits in a chunk, bands that are written ahead; -1: visits only of what is kept)."""
    for i in range(6):
        rows = draw.choice([64, 130, 200, 260])
        channels = draw.choice([1, 2, 4, 8])
        numbers = draw.choice([1, 2, 5]), draw.choice([1, 2]), draw.choice([0, 1])
        yield f"layer {i}", (rows + 2, 5, channels), rows, *numbers


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("buffers", "near"), [(2, 0), (3, 20_000), (4, 0)])
def test_no_two_queues_meet(gpu, seed, buffers, near):
    draw = random.Random(seed)
    network = list(layers(draw))
    parked = Parked(Parking(None, 0, buffers, near=near), CPU)

    def uses(dry, left_out=None, starts=False):
        for key, plane, rows, most, visits, behind in network:
            if key == left_out:
                continue
            for visit in range(visits):
                first = starts and visit == 0
                frames = 1 if first else most
                bands = parked.bands(key, plane, torch.float32, 2, frames, rows, 1, 3, 1, starts=first)
                if dry:
                    for band in bands:
                        parked.note(key, band, frames)
                else:
                    yield key, bands, frames, behind

    list(uses(True))
    parked._aside = True
    parked.allocate()
    ahead = tall = 0
    with gpu:
        for chunk in range(5):
            if chunk == 3:
                parked.restart()
            starts = chunk in (0, 3)
            if chunk == 1 or draw.random() < 0.8:  # else nobody announces it
                list(uses(True, starts=starts))
            # Something else than what was announced.
            left_out = None if chunk == 1 else draw.choice([None, "layer 2", "layer 4"])
            parked.ends = draw.random() < 0.3
            head = draw.choice(["zero", "replicate"])
            for key, bands, frames, behind in uses(False, left_out, starts):
                waiting = []
                for band in bands:
                    buffer = parked.enter(key, band, frames)
                    ahead, tall = max(ahead, len(parked._ahead)), tall + bool(band.parts)
                    gpu.touch(buffer.view[2:], True)
                    parked.arrive(buffer, head)
                    waiting.append(buffer)
                    if len(waiting) > behind:
                        finish(parked, gpu, waiting.pop(0))
                for buffer in waiting:
                    finish(parked, gpu, buffer)
    assert not parked.coming and not parked._ahead and not parked._entered
    assert ahead >= 1 and tall and gpu.beside  # queues did run side by side
    for a, b in itertools.pairwise(sorted(parked._left, key=lambda buffer: buffer.start)):
        assert a.end <= parked._room and b.end <= parked._room
    parked.free()


def finish(parked, gpu, buffer):
    gpu.touch(buffer.view, False)
    parked.leave(buffer)


def test_a_wait_that_is_left_out_is_found(gpu):
    parked = Parked(Parking(None, 0, 2), CPU)
    (band,) = parked.bands("a", (34, 5, 4), torch.float32, 2, 1, 32, 1, 3, 1)
    parked.note("a", band, 1)
    parked._aside = True
    parked.allocate()
    parked._out.wait_event = lambda event: None
    with gpu, pytest.raises(AssertionError, match="out meets main"):
        buffer = parked.enter("a", band, 1)
        gpu.touch(buffer.view[2:], True)
        parked.arrive(buffer, "zero")
    parked.free()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("buffers", "near"), [(2, 0), (3, 20_000)])
def test_broken_off_clip(gpu, seed, buffers, near):
    """Before a copy, between two of them, or before the convolution: the next clip begins in the same memory."""
    draw = random.Random(seed)
    network = list(layers(draw))
    parked = Parked(Parking(None, 0, buffers, near=near), CPU)

    def bands(key, plane, rows, frames):
        return parked.bands(key, plane, torch.float32, 2, frames, rows, 1, 3, 1)

    def announce():
        for key, plane, rows, frames, visits, _ in network:
            for _ in range(visits):
                for band in bands(key, plane, rows, frames):
                    parked.note(key, band, frames)

    announce()
    parked._aside = True
    parked.allocate()
    breaks = 0

    class Broken(Exception):
        pass

    def chunk(left):
        for key, plane, rows, frames, visits, _ in network:
            for _ in range(visits):
                for band in bands(key, plane, rows, frames):
                    buffer = parked.enter(key, band, frames)
                    if (left := left - 1) == 0:
                        raise Broken
                    gpu.touch(buffer.view[2:], True)
                    if (left := left - 1) == 0:
                        with pytest.MonkeyPatch.context() as patch:
                            patch.setattr(parked._out, "record_event", broken)
                            parked.arrive(buffer, "zero")
                            raise Broken  # a history near by
                    parked.arrive(buffer, "zero")
                    if (left := left - 1) == 0:
                        raise Broken
                    finish(parked, gpu, buffer)

    def broken():
        raise Broken

    with gpu:
        for _ in range(8):
            announce()
            try:
                for _ in range(3):
                    chunk(draw.choice([draw.randrange(1, 60), -1]))
                    announce()
            except Broken:
                breaks += 1
            parked.restart()
            assert not parked._entered and not parked._ahead and not parked.coming
    assert breaks
    parked.free()
