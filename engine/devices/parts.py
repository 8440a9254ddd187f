"""Parts of a call's results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..report import Report
from ..run.results import Finished

#: What becomes of a part.
WAITING, RUNNING, DONE = range(3)


@dataclass(eq=False)
class Part:
    """Results [first, end) of a clip, for the device of this number. level: types that were too narrow in front of it.

    again: it is to be stopped, and made at another level. share: of it that is through the network. ready: finished
    results that wait for their turn.
    """

    clip: int
    first: int
    end: int
    device: int
    level: int = 0
    state: int = WAITING
    again: bool = False
    share: float = 0.0
    report: Report | None = None
    ready: deque[Finished] = field(default_factory=deque)

    @property
    def after(self) -> int:
        """The level behind it."""
        return self.level + (self.report.events["nan_reruns"] if self.report is not None else 0)

    def restart(self, level: int) -> None:
        self.level, self.state, self.again, self.share, self.report = level, WAITING, False, 0.0, None
        self.ready.clear()


def describe(report: Report, parts: Sequence[Part], what: str, held: int | None) -> None:
    """What a call's report says of all its parts. what: results are called; held: the most of them that waited for
    their turn (None: none had to)."""
    made = [p for p in parts if p.report is not None]
    if not made:
        return
    first, reports = made[0].report, [p.report for p in made]
    report.parts = [(range(p.first, p.end), p.report) for p in made]
    report.mode, report.operands, report.off, report.db = first.mode, first.operands, first.off, first.db
    waited = "" if held is None else f", at most {held} {what} waiting"
    report.plan = f"{len({p.device for p in made})} devices, {len(made)} parts{waited}; {first.plan}"
    report.precision = max(reports, key=lambda r: len(r.precision)).precision
    report.predicted_gb = max(r.predicted_gb or 0.0 for r in reports)
    report.parked_gb = sum(r.parked_gb for r in reports)
    for name in ("reserved_gb", "allocated_gb", "before_gb"):
        found = [value for r in reports if (value := getattr(r, name)) is not None]
        setattr(report, name, max(found, default=None))
    for r in {id(r): r for r in reports}.values():
        report.events.update(r.events)
