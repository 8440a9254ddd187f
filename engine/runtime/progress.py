"""Progress and cancellation of a run."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import Cancelled

#: progress(done, total) after each chunk; cancel() says whether to stop.
Progress = Callable[[int, int], None]
Cancel = Callable[[], bool]


class Ticker:
    """Reports progress and asks for cancellation."""

    def __init__(self, progress: Progress | None, cancel: Cancel | None) -> None:
        self._progress, self._cancel = progress, cancel
        self._total = self._done = 0

    def begin(self, total: int) -> None:
        """From nothing; total: latents of all clips, times the passes that each goes through."""
        self._total, self._done = total, 0

    def check(self) -> None:
        if self._cancel is not None and self._cancel():
            raise Cancelled("cancelled")

    def reach(self, done: int) -> bool:
        """`done` of the total are through, whatever the chunks. False, and no report, where that was so before."""
        if done <= self._done:
            return False
        self._done = done
        if self._progress is not None:
            self._progress(done, self._total)
        return True
