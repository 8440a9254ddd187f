"""Processes that compile and measure: a tuning starts them and ends them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ... import log
from ...errors import ZeroWasteError
from ...kernels.cards import AUTO, VARIABLE
from ...kernels.conv3d.schedules import Schedule
from ...system.hardware import cores, no_window
from ...system.memory import available_ram
from .layers import Layer
from .search import PULSE
from .worker import as_ask

ROOT = Path(__file__).resolve().parents[3]
#: Imports the package under its own name, because a host's folder of it may have another one.
CODE = """
import importlib.util, sys
root, mode, where = sys.argv[1:]
spec = importlib.util.spec_from_file_location("zerowaste_vae", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["zerowaste_vae"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from zerowaste_vae.engine.extras.tuning.worker import main
main(mode, where)
"""
#: Bytes of host memory that a compiling process takes, and the largest number of them.
EACH_BYTES, MOST = 700 << 20, 16
#: Seconds without an answer after which a measuring process counts as hanging.
SILENCE = 40.0


class Worker:
    """One process that answers lines of JSON.

    It is no process of an executor: a host has its own main module and name for this package, which an executor's
    processes would import, and one that dies would end all others of its executor."""

    def __init__(self, mode: str, where: str, way: str = AUTO) -> None:
        """Start the process.

        Args:
            mode: "compile" or "measure".
            where: compute capability or device, see `worker.main`.
            way: how kernels are launched there, a `Target.way`.

        Raises: ZeroWasteError where the system starts no process.
        """
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        if mode == "compile":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # it must not take memory of a GPU
        environment |= {VARIABLE: way}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CODE, str(ROOT), mode, where], env=environment, text=True, encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                creationflags=no_window(),
            )  # fmt: skip
        except OSError as error:
            raise ZeroWasteError(f"tuning: {sys.executable} does not start ({error.strerror or error})") from error
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while line := self._process.stdout.readline():
            self._lines.put(line)
        self._lines.put("")

    def ask(self, question: dict[str, Any]) -> None:
        with suppress(OSError):  # the process has ended: `answer` returns None then
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next answer, or None if the process has ended. Raises queue.Empty after `seconds` without one."""
        line = self._lines.get(timeout=seconds if seconds is None else max(seconds, 0.01))
        return json.loads(line) if line.endswith("\n") else None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # a question that was not read is still in its buffer
                stream.close()


class Pool:
    """Compiles in parallel processes, as a `search.Compiler`: a thread for each process.

    The threads are daemons, unlike an executor's, so that a host that quits does not wait for what is still queued."""

    def __init__(self, sm: int) -> None:
        room = available_ram()
        most = MOST if room is None else max(1, min(MOST, room // 2 // EACH_BYTES))
        self._count, self._sm = max(1, min(most, cores() - 1)), sm
        self._queue: queue.SimpleQueue[tuple[Future[str | None], Layer, Schedule]] = queue.SimpleQueue()
        self._jobs: dict[Any, list[Future[str | None]]] = {}
        self._workers: list[Worker] = []
        self._lock, self._ended = threading.Lock(), False

    def start(self, jobs: Sequence[tuple[Layer, list[Schedule]]]) -> None:
        for layer, schedules in jobs:
            self._jobs[layer.kind] = [Future() for _ in schedules]
            for result, schedule in zip(self._jobs[layer.kind], schedules, strict=True):
                self._queue.put((result, layer, schedule))
        for _ in range(min(self._count, self._queue.qsize())):
            threading.Thread(target=self._work, daemon=True).start()

    def wait(self, layer: Layer, until: float) -> list[str | None] | None:
        jobs = self._jobs[layer.kind]
        late = futures.wait(jobs, max(until - time.monotonic(), 0.0)).not_done
        return None if late else [job.result() for job in jobs]

    def end(self) -> None:
        with self._lock:
            self._ended = True
            for worker in self._workers:
                worker.end()

    def _work(self) -> None:
        worker = None
        with suppress(queue.Empty):
            while not self._ended:
                result, layer, schedule = self._queue.get_nowait()
                try:
                    if worker is None and (worker := self._started()) is None:
                        return
                    worker.ask(as_ask(layer, schedule))
                    answer = worker.answer()
                except Exception as error:  # `wait` raises it
                    result.set_exception(error)
                    continue
                if answer is None:
                    worker = None
                result.set_result("the compiler ended the process" if answer is None else answer["error"])

    def _started(self) -> Worker | None:
        with self._lock:
            if self._ended:
                return None
            self._workers.append(Worker("compile", str(self._sm)))
            return self._workers[-1]


class Gpu:
    """Measures on one GPU, as a `search.Timer`.

    A kernel that ends the process or hangs is dropped, and another process goes on with the others."""

    def __init__(self, device: torch.device, way: str = AUTO) -> None:
        self._device, self._way = device, way
        self._worker: Worker | None = None

    def start(self) -> None:
        """Start the process, which begins to load libraries."""
        self._worker = self._worker or Worker("measure", str(self._device), self._way)

    def link(self, until: float, check: Callable[[], None]) -> float | None:
        """Return the bytes per second of the link to host memory, each way; None where it could not be measured.

        Args:
            until: time.monotonic() at which to stop.
            check: called while waiting; may raise, to cancel.
        """
        self.start()
        self._worker.ask({"link": True})
        until = min(until, time.monotonic() + SILENCE)
        while (left := until - time.monotonic()) > 0:
            check()
            with suppress(queue.Empty):
                if answer := self._worker.answer(min(PULSE, left)):
                    return answer["link"]
                break
        self.end()
        return None

    def measure(
        self, layer: Layer, schedules: Sequence[Schedule], until: float
    ) -> tuple[list[list[float]], list[str | None]] | None:
        wrong: list[str | None] = [None] * len(schedules)
        while left := [i for i, why in enumerate(wrong) if why is None]:
            self.start()
            self._worker.ask(as_ask(layer, *(schedules[i] for i in left)))
            at, why = None, "ended the process"
            try:
                while answer := self._worker.answer(min(SILENCE, until - time.monotonic())):
                    if "at" in answer:
                        at = left[answer["at"]]
                    elif "wrong" in answer:
                        wrong[left[answer["wrong"]]] = answer["why"]
                    elif "memory" in answer:
                        log.once(f"tuning {layer.kind}: {answer['memory']}")
                        return None
                    else:
                        times = {left[int(i)]: t for i, t in answer["times"].items()}
                        return [times.get(i, []) for i in range(len(schedules))], wrong
            except queue.Empty:
                if time.monotonic() >= until:
                    self.end()
                    return None
                why = f"did not end within {SILENCE:.0f} s"
            self.end()
            if at is None:  # it ended before any schedule ran, so none of them is to blame
                return None
            wrong[at] = why
        return [[] for _ in schedules], wrong

    def end(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker = None
