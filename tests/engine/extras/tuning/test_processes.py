"""The processes that compile, without a GPU: what they make, what they refuse, and how they end."""

import importlib.util
import json
import queue
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine.errors import Cancelled, ZeroWasteError
from zerowaste_vae.engine.extras.tuning import processes, worker
from zerowaste_vae.engine.extras.tuning.layers import Layer
from zerowaste_vae.engine.extras.tuning.processes import Gpu, Pool, Worker
from zerowaste_vae.engine.kernels.conv3d.schedules import Schedule
from zerowaste_vae.engine.kernels.conv3d.tuned import Kind

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="compiling needs Triton")
KIND = Kind("float16", "f32", 16, 16, False, 1, 3, False, False)
LAYER = Layer(KIND, 0.5, (1, 3, 3), (1, 1, 1), 0, False, (1, 1, 1), (0, 0), 1, (64, 64), 0, False, False, 1,
              "float16")  # fmt: skip


def test_compiles_without_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pool, other = Pool(90), replace(LAYER, kind=KIND._replace(sums=True))
    try:
        pool.start([(LAYER, [Schedule(128, 16, 16, 4, 2), Schedule(100, 16, 16, 4, 2)])])
        assert pool.wait(LAYER, time.monotonic() - 1) is None
        right, wrong = pool.wait(LAYER, time.monotonic() + 120)
    finally:
        pool.end()
    assert right is None and "100" not in str(right) and wrong and "\n" not in wrong
    assert list(tmp_path.rglob("*.cubin"))
    assert all(worker._process.poll() is not None for worker in pool._workers)
    with pytest.raises(KeyError):  # nobody was asked
        pool.wait(other, time.monotonic())


def test_ended_process():
    worker = Worker("compile", "nonsense")
    worker.ask({})
    assert worker.answer(60) is None
    worker.end()


def test_unread_question():
    worker = Worker("compile", "nonsense")
    worker._process.kill()
    worker._process.wait()
    worker.ask({})  # stays in the buffer
    assert worker.answer(60) is None
    worker.end()


def test_answer_times_out():
    worker = Worker("compile", "90")
    with pytest.raises(queue.Empty):
        worker.answer(0.01)
    worker.end()


@pytest.mark.parametrize("dies", [0, 2])
def test_dying_compiler(monkeypatch, dies):
    """A schedule that ends its process is the only one that fails; another process compiles the others."""

    class Dying:
        def __init__(self, *_):
            started.append(self)

        def ask(self, question):
            self._dead = question["schedule"]["columns"] == 16 * (dies + 1)

        def answer(self):
            return None if self._dead else {"error": None}

        def end(self):
            pass

    started = []
    monkeypatch.setattr(processes, "Worker", Dying)
    monkeypatch.setattr(processes, "cores", lambda: 2)
    pool = Pool(90)
    pool.start([(LAYER, [Schedule(128, 16 * (i + 1), 16, 4, 2) for i in range(4)])])
    found = pool.wait(LAYER, time.monotonic() + 60)
    pool.end()
    assert [i for i, why in enumerate(found) if why] == [dies] and len(started) == 2


def test_no_process_starts(monkeypatch):
    """A system that starts no process ends the tuning with one line."""

    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(processes.subprocess, "Popen", refuse)
    pool = Pool(90)
    pool.start([(LAYER, [Schedule(128, 16, 16, 4, 2)])])
    with pytest.raises(ZeroWasteError, match="Cannot allocate memory"):
        pool.wait(LAYER, time.monotonic() + 60)
    with pytest.raises(ZeroWasteError, match="Cannot allocate memory"):
        Gpu(torch.device("cuda")).start()
    pool.end()


def test_cancel_during_start():
    """Its libraries take 5 to 10 s to load, in which it says nothing."""

    class Silent:
        ended = False

        def ask(self, question):
            assert question == {"link": True}

        def answer(self, seconds):
            raise queue.Empty

        def end(self):
            Silent.ended = True

    def check():
        looked.append(1)
        if len(looked) == 3:
            raise Cancelled

    looked, gpu = [], Gpu(torch.device("cpu"))
    gpu._worker = Silent()
    with pytest.raises(Cancelled):
        gpu.link(time.monotonic() + 60, check)
    assert gpu.link(time.monotonic() + 0.01, lambda: None) is None and Silent.ended


@pytest.mark.parametrize("bad", [0, 2])
def test_broken_context_drops_one_schedule(monkeypatch, bad):
    """After an illegal access everything fails in that process, right schedules too: another process goes on."""
    schedules, broken = [Schedule(128, 16 * (i + 1), 16, 4, 2) for i in range(4)], []

    def use(*_):
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def wrong(layer, target, schedule, small, want):
        use()
        if schedule == schedules[bad]:
            broken.append(schedule)
            use()

    class Answers:
        """A process with a Meter in it, as `worker.main` runs it."""

        def __init__(self, *_):
            broken.clear()
            self._said, self._meter = queue.Queue(), worker.Meter.__new__(worker.Meter)
            self._meter.device = self._meter.target = None

        def ask(self, question):
            try:
                for answer in self._meter(json.loads(json.dumps(question))):
                    self._said.put(json.loads(json.dumps(answer)))
            except RuntimeError:
                self._said.put(None)

        def answer(self, seconds):
            return self._said.get(timeout=1)

        def end(self):
            pass

    monkeypatch.setattr(worker, "wrong", wrong)
    monkeypatch.setattr(worker.Meter, "_made", lambda *_: use() or SimpleNamespace(out=torch.empty(1), reference=use))
    monkeypatch.setattr(worker.Meter, "_timed", lambda *_: use() or 1.0)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, use)
    monkeypatch.setattr(processes, "Worker", Answers)
    times, why = Gpu(torch.device("cuda")).measure(LAYER, schedules, time.monotonic() + 60)
    assert [bool(t) for t in times] == [i != bad for i in range(4)]
    assert [i for i, w in enumerate(why) if w] == [bad]
