"""Progress and cancellation of a run."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import Cancelled

#: progress(done, total), in chunks; cancel() says whether to stop.
Progress = Callable[[int, int], None]
Cancel = Callable[[], bool]


class Ticker:
    """Reports progress and asks for cancellation."""

    def __init__(self, progress: Progress | None, cancel: Cancel | None, total: int) -> None:
        self._progress, self._cancel, self._total, self._done = progress, cancel, total, 0

    def check(self) -> None:
        if self._cancel is not None and self._cancel():
            raise Cancelled("cancelled")

    def advance(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
