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
        self._latents = self._chunk = self._chunks = self._total = 1
        self._reached = self._done = 0

    def begin(self, latents: int, chunk: int, passes: int) -> None:
        """From nothing: so many passes (of clips, or tiles) over `latents`, reported in chunks of `chunk`."""
        self._latents, self._chunk, self._chunks = latents, chunk, -(-latents // chunk)
        self._total = passes * self._chunks
        self._reached = self._done = 0

    def check(self) -> None:
        if self._cancel is not None and self._cancel():
            raise Cancelled("cancelled")

    def reach(self, latents: int) -> bool:
        """So many are through, those of earlier passes included, whatever the chunks are by now. False, and no report,
        where that was so before."""
        if latents <= self._reached:
            return False
        self._reached = latents
        passes, rest = divmod(latents, self._latents)
        done = passes * self._chunks + -(-rest // self._chunk)
        if done > self._done and self._progress is not None:
            self._progress(done, self._total)
        self._done = done
        return True
