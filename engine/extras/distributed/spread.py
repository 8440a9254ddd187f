"""One decode or encode on several devices: each makes parts of the results, equal bit by bit to those of one device.

Each device of this process has a thread. The caller's thread hands results on in order, while later parts are made."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import log
from ...errors import Cancelled, PlanError
from ...execution.core import Core
from ...execution.guard import scoped
from ...execution.job import Job
from ...execution.progress import Ticker
from ...execution.results import Finished, Results
from ...planning.plan import Plan
from ...precision.policy import Policy
from ...report import Report
from .devices import measured, of_a_device
from .parts import DONE, RUNNING, WAITING, Feed, Part, behind_a_lead, describe
from .shares import in_rounds, leads_of, split

#: Seconds that devices get to finish their chunk when the call is over for another reason.
PATIENCE = 120.0
#: Seconds between two checks of whether the caller cancels.
PULSE = 0.1


@dataclass
class Spread:
    """One call shared among devices.

    cores: the VAE on each device. job: what is asked. policy: the operands of all parts. feed: input that they read."""

    cores: list[Core]
    job: Job
    policy: Policy
    feed: Feed
    #: Wait for devices to finish their chunk when the call is over.
    _patient = True

    def __post_init__(self) -> None:
        self.parts: list[Part] = []
        #: Index of the first part whose results are not all handed on.
        self._front = 0
        self._stop, self._turn = threading.Event(), threading.Condition()
        self._messages: queue.Queue[tuple[str, Any, Any]] = queue.Queue()
        self._working = list(range(len(self.cores)))
        self._safer: dict[tuple[int, int], Core] = {}
        self._reached = 0
        self.rates = self.measured()

    def run(self, report: Report) -> Generator[Finished, None, None]:
        """Yield the finished results in order.

        Raises: Cancelled, the last working device's error, and at once any error that other devices would meet too.
        """
        self.report = report
        report.device = self.describe_devices()
        for core in self.cores:
            core.sharing, core.planner.walk.launched = self.neighbours, self.threads
        try:
            self.parts = self.first_parts()
            yield from scoped(lambda: report.stage(report.operation), self.results())
        finally:
            for core in self.cores:
                core.sharing = core.planner.walk.launched = 1
            waited = self.held if self.parts and self.job.into.room is not None else None
            describe(report, self.parts, "frames" if self.job.half == "decoder" else "latents", waited)
        report.complete = True

    def measured(self) -> list[float]:
        """Return the relative speeds of the devices."""
        return measured(self.cores)

    @property
    def alone(self) -> bool:
        """Check whether one device is faster without the others."""
        return len({part.device for part in self.first_parts()}) == 1

    @property
    def neighbours(self) -> int:
        """Return the number of devices that share this machine's memory."""
        return len(self.cores)

    @property
    def threads(self) -> int:
        """Return the number of devices that this process launches kernels for."""
        return len(self.cores)

    def describe_devices(self) -> str:
        return ", ".join(str(core.device) for core in self.cores)

    # -- assignment of parts to devices ----------------------------------------------------------------------------

    def first_parts(self) -> list[Part]:
        """Return the parts in order; where results are handed on, in rounds, as room for waiting ones is limited."""
        leads = leads_of(self._program, *self._input, self.job.latents[0])
        first, end = leads.of(self.job.wanted.start), leads.of(self.job.wanted.stop - 1) + 1
        if self.job.into.room is None:
            shares = split(leads, end, self.rates, self.job.clips, self._step(), (first, self.job.clips * end))
        else:
            room = self.job.into.room // (self.job.into.nbytes * leads.results)
            shares = in_rounds(leads, end, self.rates, self._step(), (first, end), room, self._window())
        parts = []
        for share in shares:
            for clip, a, b in share.parts(end):
                parts += self._part(clip, leads.begins(a), leads.begins(b), share.device)
        return parts

    def _part(self, clip: int, first: int, end: int, device: int, level: int = 0) -> list[Part]:
        first, end = max(first, self.job.wanted.start), min(end, self.job.wanted.stop)
        return [Part(clip, first, end, device, level)] if first < end else []

    @property
    def _program(self):  # noqa: ANN202 - the Program of the component
        return getattr(self.cores[0].model, self.job.half).program

    @property
    def _input(self) -> tuple[int, int]:
        """Return the rows and columns of the component's input."""
        scale = self.cores[0].architecture.spatial if self.job.half == "encoder" else 1
        return scale * self.job.latents[1], scale * self.job.latents[2]

    def _step(self) -> int:
        """Return the latents per chunk: parts begin where one device's chunks do, those of single frames anywhere."""
        try:
            job = self.job
            plan = self.cores[0]._plan(job.half, job.latents, job.request, check=job.callbacks.ticker.check)
            return 1 if self.cores[0].architecture.in_tiles or self._program.style.single else plan.steps.unit or 1
        except PlanError:
            return 1

    def _window(self) -> int:
        """Return how many parts from the one handed on may be made: one for each device and the next one of all but the
        last, so that none waits for others' results to be taken."""
        return 2 * len(self.cores) - 1

    @property
    def held(self) -> int:
        """Return the largest number of finished results that wait for their turn."""
        n = self._window()
        return max(sum(p.end - p.first for p in self.parts[i : i + n]) for i in range(len(self.parts)))

    def _hand_over(self, part: Part, done: int, error: Exception) -> None:
        """Give what a failed device has left to the others."""
        self._working.remove(part.device)
        if not self._working:
            self._messages.put(("fatal", part, error))
            return
        names = ", ".join(str(self.cores[i].device) for i in self._working)
        log.warn(f"{self.cores[part.device].device}: {error}; the rest of its part goes to {names}")
        self.report.events["handed_over"] += 1
        rest = self._part(part.clip, done, part.end, part.device, part.after)
        part.end, part.state = done, DONE
        at = self.parts.index(part)
        self.parts[at + (part.first < done) : at + 1] = rest
        for left in [p for p in self.parts if p.device == part.device and p.state == WAITING]:
            at = self.parts.index(left)
            self.parts[at : at + 1] = self._shared(left)

    def _shared(self, part: Part) -> list[Part]:
        """Split a part among the working devices."""
        leads, out = leads_of(self._program, *self._input, self.job.latents[0]), []
        span = leads.of(part.first), leads.of(part.end - 1) + 1
        rates = [self.rates[i] for i in self._working]
        shares = split(leads, self.job.latents[0], rates, bounds=span)
        for share in shares:
            begin = part.first if share is shares[0] else leads.begins(share.first)
            end = part.end if share is shares[-1] else leads.begins(share.end)
            out += self._part(part.clip, begin, end, self._working[share.device], part.level)
        return out

    def _follow(self, part: Part) -> None:
        """Move later parts to the wider type that `part` needed: they need it too."""
        for later in self.parts[self.parts.index(part) + 1 :]:
            if later.level < part.after:
                if later.device not in self._working:
                    later.device = self._working[0]
                if later.state == RUNNING:
                    later.level, later.again = part.after, True
                    later.ready.clear()
                else:
                    later.restart(part.after)

    # -- the caller's thread ---------------------------------------------------------------------------------------

    def results(self) -> Generator[Finished, None, None]:
        """Yield the results in order, while the devices' threads go on."""
        inference, core = torch.is_inference_mode_enabled(), self.cores[0]
        pressure = core.asks()
        # Devices without a part get a thread too: they may take over another one's.
        threads = [threading.Thread(target=self._work, args=(i, inference, pressure is not None and not i),
                                    name=f"zerowaste {i}", daemon=True) for i in range(len(self.cores))]  # fmt: skip
        try:
            for thread in threads:
                thread.start()
            while self._front < len(self.parts):
                self.job.callbacks.ticker.check()
                self._read()
                self._listen(pressure)
                yield from self._turned()
        finally:
            self._stop.set()
            end = time.monotonic() + PATIENCE
            for thread in threads:
                if thread is threading.current_thread():  # garbage collection in it closes an abandoned generator
                    continue
                while thread.is_alive() and self._patient and time.monotonic() < end:
                    thread.join(PULSE)
                if thread.is_alive() and self._patient:
                    log.warn(f"{thread.name}: a device has not come to the end of its chunk in {PATIENCE:g} s")
        self._progress()

    def _read(self) -> None:
        """Read the input of the next part that may be made."""
        self.feed.drop(self.parts[self._front].first)
        for part in self.parts[self._front : self._front + self._window()]:
            if not self.feed.has(part.first, part.end):
                self.feed.fill(part.first, part.end)
                return

    def _turned(self) -> Iterator[Finished]:
        """Yield the ready results of the parts whose turn it is."""
        while self._front < len(self.parts):
            with self._turn:
                part = self.parts[self._front]
                ready, ended = list(part.ready), part.state == DONE
                part.ready.clear()
            yield from ready
            if not ended:
                return
            with self._turn:  # only now: results that the caller has not taken yet count as waiting too
                self._follow(part)
                self._front += 1
                self._turn.notify_all()

    def _listen(self, pressure: Callable[[], None]) -> None:
        """Handle the messages of the devices' threads, waiting at most PULSE seconds for the first."""
        wait = True
        while True:
            try:
                kind, part, value = self._messages.get(wait, PULSE)
            except queue.Empty:
                return
            wait = False
            if kind == "fatal":
                raise value
            if kind == "plan" and self.job.callbacks.on_plan is not None:
                self.job.callbacks.on_plan(value)
            elif kind == "pressure":
                try:
                    pressure()
                finally:
                    value.set()
            elif kind == "progress":
                part.share = value
                self._progress()

    def _progress(self) -> None:
        if self.job.callbacks.progress is not None:
            total = len(self.job.wanted) * self.job.clips
            made = sum(int((p.end - p.first) * (1.0 if p.state == DONE else p.share)) for p in list(self.parts))
            self._reached = max(self._reached, min(total, made))
            self.job.callbacks.progress(self._reached, total)

    def _ask(self) -> None:
        """Have the caller's thread free memory, and wait until it has."""
        done = threading.Event()
        self._messages.put(("pressure", None, done))
        while not done.wait(PULSE) and not self._stop.is_set():
            pass

    # -- a device's thread -----------------------------------------------------------------------------------------

    def _work(self, device: int, inference: bool, asks: bool) -> None:
        """Make the device's parts in order. asks: have the caller's thread free memory under pressure."""
        if asks:
            self.cores[device]._own.asks = self._ask
        with torch.inference_mode(inference):
            while device in self._working and (part := self._next(device)) is not None:
                self._make(part)

    def _next(self, device: int) -> Part | None:
        with self._turn:
            while not self._stop.is_set() and self._front < len(self.parts):
                end = None if self.job.into.room is None else self._front + self._window()
                for part in self.parts[self._front : end]:
                    mine = part.device == device and part.state == WAITING
                    if mine and self.feed.has(part.first, part.end):
                        part.state = RUNNING
                        return part
                self._turn.wait(PULSE)
        return None

    def _make(self, part: Part) -> None:
        def progress(done: int, total: int) -> None:
            self._messages.put(("progress", part, done / max(total, 1)))

        results, error = self.job.into.part(part.clip, part.first), None
        tick = Ticker(progress, lambda: self._stops(part))
        try:
            with closing(self.made(part, results, tick)) as done:
                for finished in done:
                    self._keep(part, finished)
        except Cancelled:
            part.again = True
        except Exception as raised:
            error = raised
        for finished in results.ready():
            self._keep(part, finished)
        with self._turn:
            if part.again:
                part.restart(part.level)
            elif error is None:
                part.state = DONE
            elif of_a_device(error):
                self._hand_over(part, results.done, error)
            else:
                self._messages.put(("fatal", part, error))
            self._turn.notify_all()
        self._messages.put(("made", part, None))

    def _stops(self, part: Part) -> bool:
        """Check at the end of a chunk whether to stop."""
        return self._stop.is_set() or part.again

    def made(self, part: Part, results: Results, tick: Ticker) -> Generator[Finished, None, None]:
        """Yield the results of a part, made by its device."""
        core, job = self._core(part.device, part.level), self.job
        if part.first:
            check = job.callbacks.ticker.check
            job = replace(job, request=behind_a_lead(core, job.half, job.latents, job.request, check))
        clips, wanted, planned = slice(part.clip, part.clip + 1), range(part.first, part.end), self._planned
        try:
            yield from job.run(
                core, clips, tick, results, wanted, functools.partial(planned, part), policy=self.policy
            )  # fmt: skip
        finally:
            part.report = core.last_report

    def _planned(self, part: Part, plan: Plan) -> None:
        if plan.tiled and self.job.request.tiling == "auto":
            raise PlanError(f"whole frames do not fit there, and other parts have them ({plan.note})")
        self._messages.put(("plan", part, plan))

    def _keep(self, part: Part, finished: Finished) -> None:
        with self._turn:
            if not part.again:
                part.ready.append(finished)
        self._messages.put(("ready", part, None))

    def _core(self, device: int, level: int) -> Core:
        """Return the VAE of a device, in the type after falling back `level` times to a safer one."""
        if level == 0:
            return self.cores[device]
        if (device, level) not in self._safer:
            self._safer[device, level] = self._core(device, level - 1)._safer("an earlier part of the clip")
        return self._safer[device, level]
