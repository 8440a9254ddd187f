"""Parts of a call's results."""

from __future__ import annotations

from collections import deque
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
