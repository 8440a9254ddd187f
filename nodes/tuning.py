"""The tuning that a page of the frontend may start: one at a time, in a thread of its own. No ComfyUI, no server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..engine import InputError, log
from ..engine.errors import Cancelled, ZeroWasteError
from ..engine.tuning.tune import tune, why_not
from . import planning


class Tuner:
    """One tuning in a thread of its own, and its state for those that poll."""

    def __init__(self, run: Callable[..., Any] = tune, why: Callable[[torch.device], str | None] = why_not) -> None:
        self._run, self._why = run, why
        self._lock = threading.Lock()
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: dict[str, Any] = {"state": "idle", "done": 0, "total": 0, "text": ""}

    def state(self) -> dict[str, Any]:
        """Return the state (idle, running, done, cancelled or failed), the layers done and in all, and the result in
        one line."""
        with self._lock:
            return dict(self._state)

    def start(self, model: str, busy: Callable[[], bool], device: torch.device) -> None:
        """Start a tuning. busy: returns True if a workflow runs or waits to; one that begins later ends the tuning,
        whose times it would spoil. Raises InputError, with the reason in one line, where it cannot begin."""
        if why := self._why(device):
            raise InputError(why)
        walk, off = planning.walk_of(model, device)
        if off:
            raise InputError(off)
        _check_queue(busy)
        with self._lock:
            if self._state["state"] == "running":
                raise InputError("a tuning is under way already")
            self._cancel.clear()
            self._state = {"state": "running", "done": 0, "total": 0, "text": ""}
        work = walk, device, busy
        self._thread = threading.Thread(target=self._work, args=work, name="zerowaste-tune", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Stop the tuning as soon as the present layer is done."""
        self._cancel.set()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _work(self, walk: Any, device: torch.device, busy: Callable[[], bool]) -> None:
        def cancel() -> bool:
            _check_queue(busy)
            return self._cancel.is_set()

        try:
            tuning, found = self._run(walk, device, progress=self._progress, cancel=cancel)
        except Cancelled:
            self._end("cancelled", "")
        except ZeroWasteError as error:
            self._end("failed", str(error))
        except Exception as error:
            log.warn(f"tuning failed: {type(error).__name__}: {error}")
            self._end("failed", f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            planning._planner.cache_clear()  # plans know the link's rate from now on
            ends = [f"kinds of layers tuned on this GPU: {len(tuning.schedules)}"]
            ends += [f"left as they were, for lack of time: {len(found.left)}"] if found.left else []
            ends += [f"schedules dropped: {len(found.dropped)}"] if found.dropped else []
            self._end("done", "; ".join(ends))

    def _progress(self, done: int, total: int) -> None:
        with self._lock:
            self._state |= {"done": done, "total": total}

    def _end(self, state: str, text: str) -> None:
        with self._lock:
            self._state |= {"state": state, "text": text}


def _check_queue(busy: Callable[[], bool]) -> None:
    if busy():
        raise InputError("a workflow is running: tune when the queue is empty")


TUNER = Tuner()
