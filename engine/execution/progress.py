"""Progress and cancellation of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import Cancelled
from ..planning.plan import Plan

#: progress(done, total) is called after each chunk; cancel() returns True to stop.
Progress = Callable[[int, int], None]
Cancel = Callable[[], bool]
#: Called with the plan of each attempt before it begins.
OnPlan = Callable[[Plan], None]


class Ticker:
    """Reports progress and checks for cancellation."""

    def __init__(self, progress: Progress | None, cancel: Cancel | None) -> None:
        self._progress, self._cancel = progress, cancel
        self.begin(1, 1, 1)

    def begin(self, latents: int | None, chunk: int, passes: int) -> None:
        """Start counting from nothing.

        Args:
            latents: most latents of a pass; None if unknown: chunks are counted and their total is 0.
            chunk: latents per chunk.
            passes: number of passes (of clips, or tiles).
        """
        self._latents, self._chunk = latents or 0, chunk
        self._chunks = -(-self._latents // chunk)
        self._total = passes * self._chunks
        self._reached = (0, 0)
        self._done = 0

    def check(self) -> None:
        """Raise Cancelled if cancel() returns True."""
        if self._cancel is not None and self._cancel():
            raise Cancelled("cancelled")

    def reach(self, index: int, latents: int, left: int) -> bool:
        """Note that all latents of pass `index` before number `latents` are through, and `left` are to come.

        Chunks may have changed meanwhile. Returns False, without a report, if that was so before."""
        if (index, latents) <= self._reached:
            return False
        self._reached = index, latents
        done = self._done + 1
        if self._total:
            done = index * self._chunks + -(-(self._latents - left) // self._chunk)
        if done > self._done and self._progress is not None:
            self._progress(done, self._total)
        self._done = done
        return True


@dataclass(frozen=True)
class Callbacks:
    """Progress, cancellation and plan callbacks of one call."""

    progress: Progress | None = None
    cancel: Cancel | None = None
    on_plan: OnPlan | None = None

    @property
    def ticker(self) -> Ticker:
        return Ticker(self.progress, self.cancel)
