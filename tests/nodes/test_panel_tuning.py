"""A tuning that a page starts: one at a time, told as it goes, ended when asked to. Nothing is measured here."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.errors import Cancelled
from zerowaste_vae.nodes import panel
from zerowaste_vae.nodes.panel import Tuner

GPU = torch.device("cuda", 0)
DONE = (SimpleNamespace(schedules={1: 1, 2: 2}), SimpleNamespace(left=[3], dropped=[4, 5]))


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(panel, "walk_of", lambda model, device: (model, "off here" if model == "plain" else ""))


def idle() -> bool:
    """The queue is empty."""
    return False


def tuner(run, why=None):
    return Tuner(run, lambda device: why)


def test_it_goes_and_ends():
    go, seen = threading.Event(), []

    def run(walk, device, progress, cancel):
        seen.append((walk, device, cancel()))
        progress(3, 9)
        go.wait(10)
        return DONE

    one = tuner(run)
    assert one.state()["state"] == "idle"
    one.start("a.safetensors", idle, GPU)
    while one.state()["done"] != 3:
        pass
    assert one.state() == {"state": "running", "done": 3, "total": 9, "text": ""}
    with pytest.raises(InputError, match="under way already"):
        one.start("b.safetensors", idle, GPU)
    go.set()
    one._thread.join()
    assert seen == [("a.safetensors", GPU, False)]
    assert one.state()["state"] == "done"
    ends = ["kinds of layers tuned on this GPU: 2", "left as they were, for lack of time: 1", "schedules dropped: 2"]
    assert one.state()["text"] == "; ".join(ends)


def test_cancel_and_begin_again():
    def run(walk, device, progress, cancel):
        if walk == "second":
            return DONE
        while not cancel():
            pass
        raise Cancelled

    one = tuner(run)
    one.start("first", idle, GPU)
    one.cancel()
    one._thread.join()
    assert one.state()["state"] == "cancelled"
    one.start("second", idle, GPU)
    one._thread.join()
    assert one.state()["state"] == "done"


def test_a_workflow_that_begins_ends_it():
    """Its times would be those of a GPU that does something else as well."""
    queue = threading.Event()

    def run(walk, device, progress, cancel):
        queue.set()
        cancel()
        raise AssertionError("went on beside it")

    one = tuner(run)
    one.start("a", queue.is_set, GPU)
    one._thread.join()
    assert one.state()["state"] == "failed"
    assert one.state()["text"] == "a workflow is running: tune when the queue is empty"


@pytest.mark.parametrize("error", [InputError("no room"), RuntimeError("no room\nat all")])
def test_what_fails_says_so_in_a_line(error):
    def run(*args, **options):
        raise error

    one = tuner(run)
    one.start("a", idle, GPU)
    one._thread.join()
    assert one.state()["state"] == "failed" and one.state()["text"].endswith("no room")


def test_what_cannot_begin_says_why():
    with pytest.raises(InputError, match="needs a GPU"):
        tuner(None, "needs a GPU").start("a", idle, GPU)
    with pytest.raises(InputError, match="off here"):
        tuner(None).start("plain", idle, GPU)
    with pytest.raises(InputError, match="queue is empty"):
        tuner(None).start("a", lambda: True, GPU)


def test_how_a_vae_is_known(monkeypatch):
    """By its name, or from a run."""
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"whatever\.bin is not known: run a workflow that loads it first"):
        panel.walk_of("whatever.bin", torch.device("cpu"))
    walk, off = panel.walk_of("wan_2.1_vae.safetensors", torch.device("cpu"))
    assert walk.architecture.name == "wan2.1" and "CUDA" in off
