"""Choice of a schedule for each layer, within a time budget. The compiler, the timer and the clock are arguments."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...kernels.conv3d.schedules import Schedule
from ...kernels.conv3d.tuned import Kind
from .layers import Layer
from .problem import sized

#: A schedule replaces the table's only if it takes less than this part of its time.
GAIN = 0.98
#: It must also be faster in at least this part of the rounds. A round times all schedules one after the other, so a GPU
#: that gets slower or faster meanwhile does so for all of them.
SURE = 0.75
#: Seconds between two checks for cancellation, while something is compiled or a process starts.
PULSE = 1.0


class Compiler(Protocol):
    """Compiles the jobs' schedules, in their order."""

    def wait(self, layer: Layer, until: float) -> list[str | None] | None:
        """Return for each schedule of a layer None, or why it does not compile.

        None alone if that takes longer than `until`."""


class Timer(Protocol):
    def measure(
        self, layer: Layer, schedules: Sequence[Schedule], until: float
    ) -> tuple[list[list[float]], list[str | None]] | None:
        """Return the milliseconds of each schedule in each round (none if it is wrong), and how it is wrong or None.

        None alone if that takes longer than `until`."""


@dataclass
class Outcome:
    """Result of a tuning.

    chosen: schedules of the layers that were measured, the table's among them. times: ms of the chosen and of the
    table's schedule (None: that is wrong here). rates: operations per second of the chosen."""

    chosen: dict[Kind, Schedule] = field(default_factory=dict)
    times: dict[Kind, tuple[float, float | None]] = field(default_factory=dict)
    rates: dict[Kind, float] = field(default_factory=dict)
    #: (layer, schedule, reason) of schedules that gave wrong numbers or did not run.
    dropped: list[tuple[Kind, Schedule, str]] = field(default_factory=list)
    #: Layers that keep the table's schedule: `left` for lack of time, `broken` because no schedule is right.
    left: list[Kind] = field(default_factory=list)
    broken: list[Kind] = field(default_factory=list)


def best(times: Mapping[int, Sequence[float]]) -> int:
    """Return the number of the schedule to take: 0, the table's, unless another one is faster beyond noise.

    times: ms in each round by number; schedules without times are left out."""
    medians = {i: statistics.median(t) for i, t in times.items() if t}
    if 0 not in medians:
        return min(medians, key=medians.__getitem__)
    sure = [0]
    for i, median in medians.items():
        won = sum(a < b for a, b in zip(times[i], times[0], strict=True))
        if median < GAIN * medians[0] and won >= SURE * len(times[i]):
            sure.append(i)
    return min(sure, key=medians.__getitem__)


def search(
    jobs: Sequence[tuple[Layer, list[Schedule]]], compiler: Compiler, timer: Timer, clock: Callable[[], float],
    budget: float, check: Callable[[], None] = lambda: None, progress: Callable[[int, int], None] = lambda *_: None,
) -> Outcome:  # fmt: skip
    """Choose a schedule for each layer.

    Args:
        jobs: layers with their schedules, the table's first; the most important layers first.
        compiler: compiles schedules.
        timer: checks and times them.
        clock: returns seconds.
        budget: seconds from now.
        check: may raise, to cancel.
        progress: called as progress(done, total) for each layer.
    """
    until, out = clock() + budget, Outcome()
    for done, (layer, schedules) in enumerate(jobs):
        check()
        progress(done, len(jobs))
        failed = None
        while failed is None and clock() < until:
            failed = compiler.wait(layer, min(until, clock() + PULSE))
            check()
        if failed is None:
            out.left.append(layer.kind)
            continue
        built = [s for s, why in zip(schedules, failed, strict=True) if why is None]
        found = timer.measure(layer, built, until) if built else ([], [])
        if found is None:
            out.left.append(layer.kind)
            continue
        _settle(out, layer, schedules, failed, built, *found)
    progress(len(jobs), len(jobs))
    return out


def _settle(
    out: Outcome, layer: Layer, schedules: list[Schedule], failed: list[str | None], built: list[Schedule],
    times: list[list[float]], wrong: list[str | None],
) -> None:  # fmt: skip
    """Choose for one layer."""
    kind = layer.kind
    out.dropped += [(kind, s, why) for s, why in zip(schedules, failed, strict=True) if why is not None]
    out.dropped += [(kind, s, why) for s, why in zip(built, wrong, strict=True) if why is not None]
    right = {schedules.index(s): t for s, t, why in zip(built, times, wrong, strict=True) if why is None and t}
    if not right:
        out.broken.append(kind)
        return
    taken = best(right)
    spent = statistics.median(right[taken])
    out.chosen[kind] = schedules[taken]
    out.rates[kind] = 1e3 * sized(layer).flop / spent
    out.times[kind] = spent, statistics.median(right[0]) if 0 in right else None
