"""One decode or encode on several devices of this machine: each makes a part of the results, in a thread of its own,
bit by bit what one device makes of all."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from . import log
from .core import Core
from .errors import Cancelled, InputError, PlanError, ZeroWasteError
from .operands.policy import Policy
from .planning.shares import leads_of, split
from .report import Report
from .request import Request
from .run.devices import synchronize
from .run.plan import Plan
from .run.progress import Cancel, Progress, Ticker
from .run.results import Whole

#: Seconds that devices get to come to the end of a chunk when the call is over for another reason.
PATIENCE = 120.0
#: How often the caller is asked whether to cancel, in seconds.
PULSE = 0.1


class Operation(Protocol):
    """A decode or encode of some clips: `call.decode` or `call.encode` with what they read."""

    def __call__(
        self, core: Core, clips: slice, tick: Ticker, results: Whole, wanted: range,
        on_plan: Callable[[Plan], None] | None, policy: Policy,
    ) -> Iterable[object]: ...  # fmt: skip


class _Landing(Whole):
    """A part of the results; knows up to where they are in their place."""

    def __init__(self, out: Tensor, first: int, part: int) -> None:
        """part: the part's first result."""
        super().__init__(out, first)
        self.given = self.done = part

    def land(self, clip: int, first: int, results: Tensor) -> None:
        super().land(clip, first, results)
        self.done = first + len(results)


@dataclass(eq=False)
class _Part:
    """Results [first, end) of a clip, for the device of this number; first moves on with what is made. level: types
    that were too narrow in front of it. share: of what is left that is through the network."""

    clip: int
    first: int
    end: int
    device: int
    level: int = 0
    report: Report | None = None
    error: Exception | None = None
    share: float = 0.0

    @property
    def after(self) -> int:
        """The level behind it."""
        return self.level + (self.report.events["nan_reruns"] if self.report is not None else 0)

    @property
    def order(self) -> tuple[int, int]:
        return self.clip, self.first


@dataclass
class Spread:
    """What is asked for: `wanted` results of every clip, into out [B, N, ...]. size: latents, rows and columns of
    latent pixels. rates: of the cores, relative. finished: parts that are made."""

    cores: list[Core]
    half: str
    out: Tensor
    wanted: range
    size: tuple[int, int, int]
    request: Request
    policy: Policy
    operation: Operation
    progress: Progress | None = None
    cancel: Cancel | None = None
    on_plan: Callable[[Plan], None] | None = None
    rates: list[float] = field(default_factory=list)
    finished: list[_Part] = field(default_factory=list)
    _safer: dict[tuple[int, int], Core] = field(default_factory=dict)

    def run(self, report: Report) -> None:
        """Raises what the last device raises, Cancelled, and what is not the device's fault at once."""
        self.rates = measured(self.cores)
        report.device = ", ".join(str(core.device) for core in self.cores)
        working = list(range(len(self.cores)))
        waiting = self._first_parts()
        try:
            for core in self.cores:
                core.sharing = len(self.cores)
            with report.stage(report.operation):
                while waiting:
                    self._round(waiting)
                    waiting = self._left(waiting, working, report) or self._too_narrow()
        finally:
            for core in self.cores:
                core.sharing = 1
            self._describe(report)
        report.complete = True

    # -- who makes what --------------------------------------------------------------------------------------------

    def _first_parts(self) -> list[_Part]:
        leads = leads_of(self._program, *self._input, self.size[0])
        first, end = leads.of(self.wanted.start), leads.of(self.wanted.stop - 1) + 1
        clips, parts = self.out.shape[0], []
        for share in split(leads, end, self.rates, clips, self._step(), (first, clips * end)):
            for clip, a, b in share.parts(end):
                parts += self._part(clip, leads.begins(a), leads.begins(b), share.device)
        return parts

    def _part(self, clip: int, first: int, end: int, device: int, level: int = 0) -> list[_Part]:
        first, end = max(first, self.wanted.start), min(end, self.wanted.stop)
        return [_Part(clip, first, end, device, level)] if first < end else []

    @property
    def _program(self):  # noqa: ANN202 - a Program, which halves have
        return getattr(self.cores[0].model, self.half).program

    @property
    def _input(self) -> tuple[int, int]:
        """Rows and columns of what goes in."""
        scale = self.cores[0].architecture.spatial if self.half == "encoder" else 1
        return scale * self.size[1], scale * self.size[2]

    def _step(self) -> int:
        """Latents per chunk: parts begin where one device's chunks do."""
        try:
            plan = self.cores[0]._plan(self.half, self.size, self.request)
            return 1 if plan.own is not None else plan.steps.latents or 1
        except PlanError:
            return 1

    def _left(self, parts: list[_Part], working: list[int], report: Report) -> list[_Part]:
        """What devices that failed have left, for the others."""
        failed = [p for p in parts if p.error is not None]
        for part in failed:
            if part.device in working:
                working.remove(part.device)
        if failed and not working:
            raise failed[0].error
        rest = [p for p in parts if p.first < p.end]
        out, rates, latents = [], [self.rates[i] for i in working], self.size[0]
        leads = leads_of(self._program, *self._input, latents)
        for part in failed:
            names = ", ".join(str(self.cores[i].device) for i in working)
            log.warn(f"{self.cores[part.device].device}: {part.error}; the rest of its part goes to {names}")
            report.events["handed_over"] += 1
        for part in rest:
            a, b = leads.of(part.first), leads.of(part.end - 1) + 1
            edges = [(s.first, s.end, working[s.device]) for s in split(leads, latents, rates, bounds=(a, b))]
            for i, (first, end, device) in enumerate(edges):
                begin = part.first if i == 0 else leads.begins(first)
                stop = part.end if i == len(edges) - 1 else leads.begins(end)
                out += self._part(part.clip, begin, stop, device, part.level)
        return out

    def _too_narrow(self) -> list[_Part]:
        """Parts that have to be made again: a value in front of them needed a wider type than they have."""
        level, again = 0, []
        for part in sorted(self.finished, key=lambda p: p.order):
            if part.level < level:
                again.append(part)
            level = max(level, part.after)
        needed = again and max(p.after for p in self.finished if p.order < again[0].order)
        self.finished = [p for p in self.finished if p not in again]
        return [replace(p, level=needed, report=None) for p in again]

    # -- threads ---------------------------------------------------------------------------------------------------

    def _round(self, parts: list[_Part]) -> None:
        """Every device makes its parts, in their order, or fails; what is made of them is in `finished`."""
        stop, messages = threading.Event(), queue.Queue()
        tasks = {i: [p for p in parts if p.device == i] for i in {p.device for p in parts}}
        inference, core = torch.is_inference_mode_enabled(), self.cores[0]
        pressure, core.on_pressure = core.on_pressure, core.on_pressure and (lambda: _ask(messages))

        def work(device: int) -> None:
            with torch.inference_mode(inference):
                for part in tasks[device]:
                    self._make(part, messages.put, stop.is_set)
                    if part.error is not None or stop.is_set():
                        break
            messages.put(("end", device, None))

        alive, caller = set(tasks), Ticker(None, self.cancel)
        threads = [threading.Thread(target=work, args=(i,), name=f"zerowaste {i}", daemon=True) for i in tasks]
        try:
            for thread in threads:
                thread.start()
            while alive:
                caller.check()
                self._listen(messages, alive, parts, pressure)
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
                if thread.is_alive():
                    log.warn(f"{thread.name}: a device has not come to the end of its chunk in {PATIENCE:g} s")
            core.on_pressure = pressure

    def _listen(
        self, messages: queue.Queue, alive: set[int], parts: list[_Part], pressure: Callable[[], None] | None
    ) -> None:
        """One message of the threads, in the caller's own."""
        try:
            kind, sender, value = messages.get(timeout=PULSE)
        except queue.Empty:
            return
        if kind == "end":
            alive.discard(sender)
        elif kind == "fatal":
            raise value
        elif kind == "plan" and self.on_plan is not None:
            self.on_plan(value)
        elif kind == "pressure":
            try:
                pressure()
            finally:
                value.set()
        elif kind == "progress":
            sender.share = value
            if self.progress is not None:
                total = len(self.wanted) * self.out.shape[0]
                made = sum(p.end - p.first for p in list(self.finished))
                made += sum(int(p.share * (p.end - p.first)) for p in parts)
                self.progress(min(total, made), total)

    def _make(self, part: _Part, tell: Callable[[tuple], None], stop: Cancel) -> None:
        core = self._core(part.device, part.level)
        results = _Landing(self.out[part.clip : part.clip + 1], self.wanted.start, part.first)

        def progress(done: int, total: int) -> None:
            tell(("progress", part, done / max(total, 1)))

        tick = Ticker(progress, stop)
        try:
            for _ in self.operation(
                core, slice(part.clip, part.clip + 1), tick, results, range(part.first, part.end),
                lambda plan: tell(("plan", part, plan)), self.policy,
            ):  # fmt: skip
                pass
        except Cancelled:
            return
        except Exception as error:
            part.error = error
            theirs = isinstance(error, (PlanError, RuntimeError, MemoryError))
            if not theirs or (isinstance(error, ZeroWasteError) and not isinstance(error, PlanError)):
                tell(("fatal", part, error))
        part.report = core.last_report
        if results.done > part.first:
            self.finished.append(replace(part, end=results.done, error=None))
            part.first = results.done
        if part.error is None:
            part.first = part.end

    def _core(self, device: int, level: int) -> Core:
        """The VAE of a device, in the type that follows `level` too narrow ones."""
        if level == 0:
            return self.cores[device]
        if (device, level) not in self._safer:
            self._safer[device, level] = self._core(device, level - 1)._safer("an earlier part of the clip")
        return self._safer[device, level]

    # -- what the report says --------------------------------------------------------------------------------------

    def _describe(self, report: Report) -> None:
        made = sorted((p for p in self.finished if p.report is not None), key=lambda p: p.order)
        if not made:
            return
        first, reports = made[0].report, [p.report for p in made]
        report.parts = [(range(p.first, p.end), p.report) for p in made]
        report.mode, report.operands, report.off, report.db = first.mode, first.operands, first.off, first.db
        report.plan = f"{len({p.device for p in made})} devices; {first.plan}"
        report.precision = max(reports, key=lambda r: len(r.precision)).precision
        report.predicted_gb = max(r.predicted_gb or 0.0 for r in reports)
        report.parked_gb = sum(r.parked_gb for r in reports)
        for name in ("reserved_gb", "allocated_gb", "before_gb"):
            found = [value for r in reports if (value := getattr(r, name)) is not None]
            setattr(report, name, max(found, default=None))
        for r in {id(r): r for r in reports}.values():
            report.events.update(r.events)


def _ask(messages: queue.Queue) -> None:
    """Have the caller's thread free memory, and wait for it."""
    done = threading.Event()
    messages.put(("pressure", None, done))
    done.wait(PATIENCE)


# -- which devices ----------------------------------------------------------------------------------------------------


def resolve(devices: str | Sequence[str | torch.device] | None, own: torch.device) -> list[torch.device]:
    """What `devices` names: None or "auto" is the VAE's own alone, "all" all GPUs of the process with its own first, or
    a list of names, also as one string with commas. Raises InputError."""
    if devices is None or devices in ("auto", ""):
        return [own]
    if devices == "all":
        others = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if own.type == "cuda" else []
        return [own, *(d for d in others if d != own)]
    names = [n.strip() for n in devices.split(",")] if isinstance(devices, str) else list(devices)
    if not names:
        raise InputError("devices names none: give a list such as cuda:0,cuda:1, or all")
    return [_device(name) for name in names]


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"devices: {name!r} is not a device torch knows: use cuda:N or cpu") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise InputError(f"devices: {name} is not there: torch sees {count} CUDA GPU(s)")
        return torch.device("cuda", device.index or 0)
    return device


def same_kind(kinds: Sequence[tuple[object, str]], mixed: bool) -> None:
    """Refuse devices (name, kind) of different kinds, which round differently, unless they are asked for. Raises
    InputError."""
    (first, kind), *others = kinds
    other = next(((name, k) for name, k in others if k != kind), None)
    if other is None:
        return
    names = f"{first} is {kind} and {other[0]} is {other[1]}"
    if not mixed:
        raise InputError(f"devices of different kinds do not give the same bits ({names}): use one kind, or "
                         "mixed_devices (--mixed-devices) to have them all the same")  # fmt: skip
    log.warn(f"{names}: a part's bits are those of the kind that makes it")


def kind_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def measured(cores: Sequence[Core]) -> list[float]:
    """How fast the devices are, relative: by a matrix product where they are of different kinds."""
    if len({kind_of(core.device) for core in cores}) == 1:
        return [1.0] * len(cores)
    times = []
    for core in cores:
        x = torch.ones(_SIDE, _SIDE, dtype=core.dtype, device=core.device)
        for _ in range(2):  # the first one also loads libraries
            if core.device.type == "cuda":
                synchronize(core.device)
            start = time.perf_counter()
            for _ in range(_PRODUCTS):
                x @ x
            if core.device.type == "cuda":
                synchronize(core.device)
            spent = time.perf_counter() - start
        times.append(spent)
    return [min(times) / spent for spent in times]


#: Rows of the matrices whose product is timed, and how many products.
_SIDE, _PRODUCTS = 2048, 4
