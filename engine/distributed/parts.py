"""Parts of the results of a call, each made by one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..execution.results import Finished
from ..report import Report

#: States of a part.
WAITING, RUNNING, DONE = range(3)


@dataclass(eq=False)
class Part:
    """Results [first, end) of a clip, made by device number `device`.

    level: how often earlier parts needed a safer type, because values overflowed. again: the part is to be stopped and
    made at another level. share: fraction of it that has passed the network. ready: finished results that wait for
    their turn."""

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
        """Return the level at which the next part begins."""
        return self.level + (self.report.events["nan_reruns"] if self.report is not None else 0)

    def restart(self, level: int) -> None:
        self.level, self.state, self.again, self.share, self.report = level, WAITING, False, 0.0, None
        self.ready.clear()


def describe(report: Report, parts: Sequence[Part], what: str, held: int | None) -> None:
    """Fill in a call's report from the reports of its parts.

    Args:
        report: report of the whole call.
        parts: all parts, in order.
        what: name of the results ("frames" or "latents").
        held: largest number of results that waited for their turn; None where none had to.
    """
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
