"""Memory of runs whose chunks are recorded: kept for the next run like it, with its graphs, where that pays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from ...execution.guard import Guard
from ...execution.reuse import allocated
from ...runtime.context import ExecutionContext
from ...runtime.kept import KEPT
from .graph_rule import Notes
from .graphs import Graphs, why_not_on

__all__ = ["Recorder", "why_not_on"]


class Recorder:
    """Runs with graphs, one after the other.

    The latest run's memory stays if another call would gain from its graphs, until `forget` or until any code releases
    KEPT memory."""

    def __init__(self) -> None:
        self._notes: defaultdict[Hashable, Notes] = defaultdict(Notes)
        self._latest: Graphs | None = None

    @contextmanager
    def run(
        self, make: Callable[[], ExecutionContext], key: Hashable, alike: Hashable, guard: Guard
    ) -> Iterator[Graphs]:
        """Hold the graphs of an ExecutionContext, and its memory. Args: those of the point (execution/reuse.py)."""
        graphs = self._kept(guard.device, key) or Graphs(make(), self._notes[alike], key)
        graphs.begin()
        try:
            with allocated(graphs.run, guard, graphs.worth_keeping):
                yield graphs
        except BaseException:
            graphs.clear()
            raise
        if graphs.run.allocated:
            self._latest = graphs
            KEPT.keep(graphs)
        else:
            graphs.clear()

    def drop(self, device: torch.device) -> None:
        """Free the memory that is kept on a device, for a run without graphs."""
        self._kept(device, None)

    def _kept(self, device: torch.device, key: Hashable) -> Graphs | None:
        """Return the graphs that the latest call left, if they are still there and for the same ExecutionContext.

        Memory of another ExecutionContext is freed."""
        latest, self._latest = self._latest, None
        there = KEPT.take(device, latest)
        if latest is None or (there and latest.key == key):
            return latest
        latest.notes.lose()
        if there:
            latest.free()
        return None

    def forget(self) -> None:
        """Free the kept memory, because the weights that graphs read are about to go."""
        for notes in list(self._notes.values()):
            notes.forget()
        latest, self._latest = self._latest, None
        if latest is not None and KEPT.take(latest.device, latest):
            latest.free()
