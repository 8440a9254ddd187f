"""Decide if a recording pays: times that are known, times that come late, and the rest of a call."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine.extras.graphs import graph_rule
from zerowaste_vae.engine.extras.graphs.graph_rule import CALLS, Notes, Times, kept_bytes, pays


@pytest.mark.parametrize(("launching", "span", "busy", "left", "expected"), [
    (13.0, 13.2, None, 3, False),  # 61 frames of 128x128: too few chunks to find out
    (13.0, 13.2, None, 14, True),
    (13.0, 13.2, 8.3, 3, False),
    (13.0, 13.2, 8.3, 6, True),
    (13.0, 13.2, 3.5, 3, True),
    (13.0, 13.2, 12.8, 100, False),
    (13.0, 35.3, None, 10_000, False),  # 512x512
    (13.0, 35.3, 35.0, 10_000, False),
])  # fmt: skip
def test_pays(launching, span, busy, left, expected):
    assert pays(Times(launching, span, busy), left) is expected


@pytest.mark.parametrize(("launching", "span", "busy", "expected"), [
    (28.0, 32.0, None, True),  # one Flux picture of 1024x1024 where the host is slow: the GPU works 17 ms
    (28.0, 32.0, 17.0, True),
    (20.0, 24.0, 17.0, True),  # the GPU is done long after the host, and yet has waited for it
    (11.0, 19.0, None, False),
    (11.0, 19.0, 17.0, False),
    (13.0, 35.3, None, False),
    (13.0, 35.3, 35.0, False),
    (13.0, 13.2, None, True),
])  # fmt: skip
def test_a_chunk_that_is_alone_in_its_call(launching, span, busy, expected):
    """What the GPU has left to do when the host is done, the call waits for: a replay saves all that it waited."""
    assert pays(Times(launching, span, busy), CALLS, alone=True) is expected
    assert not pays(Times(launching, span, busy), 1, alone=True)  # one call is no repetition


@pytest.mark.parametrize(("card", "gib"), [(8, 1), (64, 1), (80, 1.25), (140, 2.1875)])
def test_large_cards_keep_more(monkeypatch, card, gib):
    properties = SimpleNamespace(total_memory=card << 30)
    monkeypatch.setattr(graph_rule.torch.cuda, "get_device_properties", lambda device: properties)
    assert kept_bytes(torch.device("cuda", 0)) == int(gib * (1 << 30)) and kept_bytes(torch.device("cpu")) == 1 << 30


def test_unknown_times_pay_for_nothing():
    assert not pays(None, 10_000)


def test_each_thread_launches_a_kind_before_it_records_one():
    """cuBLAS and cuDNN cannot make a thread's handles during a recording."""
    notes = Notes()
    assert not notes.launched_here("a")
    for kind in "aab":  # new, timed, new
        notes.launch(kind, int, Late)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(notes.launched_here, "a").result()
        pool.submit(notes.launch, "a", int, Late).result()
        assert pool.submit(notes.launched_here, "a").result() and not pool.submit(notes.launched_here, "b").result()
    assert notes.launched_here("a") and notes.launched_here("b") and not notes.launched_here("c")


class Late:
    """A clock whose GPU comes to the end when told to."""

    def __init__(self, begun=True):
        self.span = None
        self._begun = begun

    def start(self):
        pass

    def stop(self):
        pass

    def begun(self):
        return self._begun

    def milliseconds(self):
        return self.span


@pytest.fixture
def host(monkeypatch):
    """host[0] is the time in seconds."""
    now = [0.0]
    monkeypatch.setattr(graph_rule, "perf_counter", lambda: now[0])
    return now


def launch(notes, host, seconds, clock):
    def work():
        host[0] += seconds
        return "result"

    assert notes.launch("kind", work, lambda: clock) == "result"


def test_timed_after_compiling(host):
    """Launches are timed once kernels are compiled."""
    notes, clock = Notes(), Late()
    launch(notes, host, 15.0, None)
    assert notes.times == {}
    launch(notes, host, 0.013, clock)
    assert notes.times == {}
    launch(notes, host, 0.001, None)  # the GPU is not there yet: neither waited for nor timed
    clock.span = 13.5
    notes.settle()
    assert notes.times["kind"] == Times(pytest.approx(13.0), 13.5)


def test_quickest_launch(host):
    """The quickest launch counts and what the gpu did stays known."""
    notes = Notes()
    launch(notes, host, 1.0, None)
    for seconds, span in ((0.020, 21.0), (0.013, 13.5), (0.030, 31.0)):
        clock = Late()
        launch(notes, host, seconds, clock)
        clock.span = span
        notes.settle()
        notes.worked("kind", span / 2)
    assert notes.times["kind"] == Times(pytest.approx(13.0), 13.5, 6.75)


def test_busy_gpu(host):
    """A gpu that begins after the last launch is busy all the time."""
    notes, clock = Notes(), Late(begun=False)
    launch(notes, host, 1.0, None)
    launch(notes, host, 0.030, clock)  # longer than launches take: the queue was full
    clock.span = 31.0
    notes.settle()
    assert notes.times["kind"].busy == 31.0
    assert not pays(notes.times["kind"], 10_000)


def test_what_is_lost_is_not_soon_kept_again():
    notes = Notes()

    def calls_until_lasting():
        for count in range(1, 10_000):
            notes.calls += 1
            if notes.lasting:
                return count
        raise AssertionError("never")

    assert calls_until_lasting() == 2
    notes.lose()
    assert calls_until_lasting() == CALLS + 1
    notes.lose()
    assert calls_until_lasting() == CALLS**2 + 1
    for _ in range(5):  # taken back after every call
        notes.forget()
        notes.calls += 1
        assert not notes.lasting
