"""Parts of frames on their way to the frames; a CPU stands for the GPU, whose copies are made at once."""

import threading
from collections import Counter

import pytest
import torch
from zerowaste_vae.engine.execution import regions
from zerowaste_vae.engine.execution.guard import Guard, NonFinite
from zerowaste_vae.engine.execution.progress import Ticker
from zerowaste_vae.engine.execution.regions import RegionWriter
from zerowaste_vae.engine.execution.results import HandedOn, Whole

CPU = torch.device("cpu")


class Event:
    def record(self, stream):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Event())
    monkeypatch.setattr(regions, "staging", lambda shape, dtype=torch.float32: torch.empty(shape, dtype=dtype))


def written(writer, frames, size=4):
    """In squares, two clips one after the other."""
    for clip, whole in enumerate(frames):
        for first in (0, 3):
            part = whole[first : first + 3]
            for y in range(0, part.shape[1], size):
                for x in range(0, part.shape[2], size):
                    region = slice(y, y + size), slice(x, x + size)
                    last = y + size >= part.shape[1] and x + size >= part.shape[2]
                    writer.write(clip, first, part[:, region[0], region[1]].clone(), region, part.sum(), last)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_frames_are_put_together(gpu, ahead, dtype):
    frames, finished, threads = torch.rand(2, 6, 9, 21, 3), [], set()
    out = torch.zeros(frames.shape, dtype=dtype)

    def finish(clip, first, count, health):
        threads.add(threading.current_thread())
        if count:
            finished.append((clip, first, count))

    writer = RegionWriter(Whole(out), CPU, finish)
    writer._ahead = ahead
    with torch.inference_mode(), writer:
        written(writer, frames)
    want = frames if dtype == torch.float32 else (frames * 255).round().to(dtype)
    assert torch.equal(out, want) and finished == [(c, f, 3) for c in (0, 1) for f in (0, 3)]
    assert (threading.current_thread() in threads) == (not ahead)
    assert ahead == (1 <= len(writer._free) <= regions.BUFFERS)


def test_streams_get_them_in_order(gpu):
    frames, results = torch.rand(1, 6, 8, 8, 3), HandedOn((8, 8, 3), torch.float32, 0, 0)
    writer = RegionWriter(results, CPU, lambda *_: None)
    writer._ahead = True
    with writer:
        written(writer, frames)
    ready = list(results.ready())
    assert [r.first for r in ready] == [0, 3] and torch.equal(torch.cat([r.results for r in ready]), frames[0])


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_found_is_raised(gpu, ahead):
    def finish(clip, first, count, health):
        if first == 3:
            raise ArithmeticError(f"at {first}")

    writer = RegionWriter(Whole(torch.zeros(1, 6, 8, 8, 3)), CPU, finish)
    writer._ahead = ahead
    with pytest.raises(ArithmeticError, match="at 3"), writer:
        written(writer, torch.rand(1, 6, 8, 8, 3))


def test_nothing_lands_after_an_error(gpu):
    out, landed = torch.zeros(1, 6, 8, 8, 3), []
    writer = RegionWriter(Whole(out), CPU, lambda *of: landed.append(of))
    with pytest.raises(KeyError), writer:
        writer.write(0, 0, torch.rand(3, 4, 8, 3), (slice(0, 4), slice(0, 8)), torch.zeros(()), False)
        raise KeyError
    assert all(count == 0 for _, _, count, _ in landed)


def test_not_finite(gpu, monkeypatch):
    """They are under way when it is found, and the last one would say that all of their frames are there."""
    out, found, guard = torch.zeros(1, 3, 8, 8, 3), threading.Event(), Guard(Ticker(None, None), CPU, Counter())
    monkeypatch.setattr(Event, "synchronize", lambda _: found.wait(20))
    writer = RegionWriter(Whole(out), CPU, guard.finish)
    writer._ahead = True
    with pytest.raises(NonFinite), writer:
        for y, value in ((0, torch.nan), (4, 0.5)):
            part = torch.full((3, 4, 8, 3), value)
            writer.write(0, 0, part, (slice(y, y + 4), slice(0, 8)), part.sum(), y == 4)
        found.set()
    assert not guard.finished[0]
