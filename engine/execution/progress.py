"""Progress and cancellation of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import Cancelled, InputError, one_line
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


class Bar:
    """A progress callback that shows a bar of tqdm: in a terminal, or as a widget in a notebook. It is closed when all
    is done, or when it is dropped."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(unit="chunk")

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


@dataclass(frozen=True)
class Callbacks:
    """Progress, cancellation and plan callbacks of one call. progress: True shows a bar.

    Raises:
        InputError: one of them cannot be called.
    """

    progress: Progress | bool | None = None
    cancel: Cancel | None = None
    on_plan: OnPlan | None = None

    def __post_init__(self) -> None:
        if self.progress is None or isinstance(self.progress, bool):
            object.__setattr__(self, "progress", Bar() if self.progress else None)
        for name, arguments in (("progress", "done, total"), ("cancel", ""), ("on_plan", "plan")):
            if (given := getattr(self, name)) is not None and not callable(given):
                cure = ", True for a bar" if name == "progress" else ""
                raise InputError(f"{name}={one_line(repr(given), 60)} cannot be called: give a function "
                                 f"{name}({arguments}){cure}, or None")  # fmt: skip

    @property
    def ticker(self) -> Ticker:
        return Ticker(self.progress, self.cancel)
