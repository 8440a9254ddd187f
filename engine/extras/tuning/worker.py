"""Process of a tuning that compiles schedules without a GPU, or checks and times them on one.

Lines of JSON come in and go out; a kernel that ends this process ends nothing else."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from ...errors import named
from ...kernels.conv3d.schedules import Schedule
from ...kernels.targets import Target, capabilities, target, triton_version
from .layers import Layer
from .problem import Problem, checked, problem, sized, wrong

#: Rounds in which all schedules are timed, one after the other, and milliseconds of one schedule's calls in a round.
ROUNDS, LEAST_MS = 9, 4.0
#: Seconds after which no further round begins, once there were FEWEST rounds.
MOST_SECONDS, FEWEST = 2.5, 3
#: Bytes that cross the link when its rate is measured, and the number of times.
LINK_BYTES, LINK_TIMES = 256 << 20, 4
Ask = dict[str, Any]


def main(mode: str, where: str) -> None:
    """Answer questions from standard input until it ends.

    Args:
        mode: "compile" or "measure".
        where: compute capability to compile for, or device to measure on.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps output of libraries out of the answers
    serve = compiler(int(where)) if mode == "compile" else Meter(torch.device(where))
    for line in sys.stdin:
        for answer in serve(json.loads(line)):
            print(json.dumps(answer), file=answers, flush=True)


# -- compiling ---------------------------------------------------------------------------------------------------------


class _NoGpu:
    """Replaces Triton's driver: kernels are compiled for a target, and nothing is launched."""

    def __init__(self, sm: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compiler(sm: int) -> Callable[[Ask], Iterator[Ask]]:
    """Return a function that compiles schedules into Triton's cache, without launching them.

    It runs the launch's own code, so that later launches find the kernels."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_NoGpu(sm))
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **options: run(self, *args, **options | {"warmup": True})
    here = capabilities(f"sm_{sm}", sm, triton_version())

    def serve(ask: Ask) -> Iterator[Ask]:
        try:
            layer = sized(Layer.from_dict(ask["layer"]))
            problem(layer, torch.device("meta")).launch(here, Schedule(**ask["schedule"]))
        except Exception as error:
            yield {"error": named(error)}
        else:
            yield {"error": None}

    return serve


# -- measuring ---------------------------------------------------------------------------------------------------------


class Meter:
    """Checks and times the schedules of one layer after the other, and measures the link to host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.target: Target = target(device)

    def __call__(self, ask: Ask) -> Iterator[Ask]:
        with torch.no_grad(), torch.cuda.device(self.device):
            if "layer" not in ask:
                yield {"link": self._link()}
                return
            try:
                yield from self._layer(Layer.from_dict(ask["layer"]), [Schedule(**s) for s in ask["schedules"]])
            except torch.OutOfMemoryError as error:  # not the fault of a schedule
                yield {"memory": named(error)}
            finally:
                torch.cuda.empty_cache()

    def _layer(self, layer: Layer, schedules: list[Schedule]) -> Iterator[Ask]:
        """Check and time the schedules of a layer.

        Yields: {"at": i} before each schedule first runs, {"wrong": i, "why": ...} for each that is wrong, and at the
        end {"times": ms of each round by number}.
        """
        right = []
        small = self._made(checked(layer))
        want = torch.empty_like(small.out)
        small.reference(want)
        for i, schedule in enumerate(schedules):
            yield {"at": i}
            try:
                why = wrong(layer, self.target, schedule, small, want)
                torch.cuda.synchronize(self.device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                why = named(error)
                torch.cuda.synchronize(self.device)  # raises where this process is unusable: another one goes on
            if why is None:
                right.append(i)
            else:
                yield {"wrong": i, "why": why}
        del small, want
        run = self._made(sized(layer))
        times: dict[int, list[float]] = {i: [] for i in right}
        repeats: dict[int, int] = {}
        for i in right:
            yield {"at": i}
            self._timed(run, schedules[i], 1)
            repeats[i] = max(1, min(20, int(LEAST_MS / max(self._timed(run, schedules[i], 1), 1e-3))))
        began = time.perf_counter()
        for done in range(ROUNDS if right else 0):
            if done >= FEWEST and time.perf_counter() - began > MOST_SECONDS:
                break
            for i in right:
                times[i].append(self._timed(run, schedules[i], repeats[i]))
        yield {"times": times}

    def _made(self, layer: Layer) -> Problem:
        return problem(layer, self.device, torch.Generator(self.device).manual_seed(0))

    def _timed(self, run: Problem, schedule: Schedule, repeats: int) -> float:
        """Return the milliseconds of one call."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run.launch(self.target, schedule)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats

    def _link(self) -> float:
        """Return the bytes per second that come from page-locked host memory while as many go back."""
        try:
            host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)]
        except RuntimeError:  # the system locks no memory: copies of a run are pageable as well then
            host = [torch.empty(LINK_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
        there = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=self.device) for _ in range(2)]
        streams = [torch.cuda.Stream(self.device) for _ in range(2)]
        seconds = []
        for _ in range(LINK_TIMES):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            with torch.cuda.stream(streams[0]):
                there[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1].copy_(there[1], non_blocking=True)
            torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        return LINK_BYTES / statistics.median(seconds[1:])


def as_ask(layer: Layer, *schedules: Schedule) -> Ask:
    """Return the question to a worker: one schedule to compile, or all of a layer's to time."""
    parts = [asdict(s) for s in schedules]
    return {"layer": layer.as_dict(), "schedule": parts[0], "schedules": parts}
