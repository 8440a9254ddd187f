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
        self.begin(1, 1, 1)

    def begin(self, latents: int | None, chunk: int, passes: int) -> None:
        """From nothing: so many passes (of clips, or tiles) over at most `latents`, reported in chunks of `chunk`.
        latents None: nobody knows; chunks are counted and their total is 0."""
        self._latents, self._chunk = latents or 0, chunk
        self._chunks = -(-self._latents // chunk)
        self._total = passes * self._chunks
        self._reached = (0, 0)
        self._done = 0

    def check(self) -> None:
        if self._cancel is not None and self._cancel():
            raise Cancelled("cancelled")

    def reach(self, index: int, latents: int, left: int) -> bool:
        """Of pass `index` all latents in front of number `latents` are through, and `left` are to come, whatever the
        chunks are by now. False, and no report, where that was so before."""
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
