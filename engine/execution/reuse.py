"""Lifetime of the memory of fused runs: allocation, release, or keeping it for the next run with its graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..extras.graphs.graph_rule import Notes
from ..extras.graphs.graphs import Graphs, why_not_on
from ..kernels.targets import target
from ..planning.plan import Plan, why_none
from ..runtime.context import ExecutionContext
from ..runtime.handover import hand_over
from ..runtime.kept import KEPT
from ..runtime.pressure import out_of_memory
from ..system.devices import aside, free_cached
from .guard import Guard


class Runs:
    """Runs one after the other.

    The latest run's memory stays if another call would gain from its graphs, until `forget` or until any code releases
    KEPT memory."""

    def __init__(self, graphs: bool, rate: int = 4) -> None:
        """Free memory that earlier runs have kept.

        Args:
            graphs: chunks may be recorded.
            rate: largest number of frames per latent.
        """
        KEPT.release()
        self._wanted, self.rate = graphs, rate
        self._notes: defaultdict[Hashable, Notes] = defaultdict(Notes)
        self._latest: Graphs | None = None
        #: Key of the latest ExecutionContext, and that ExecutionContext without its memory: planning it anew is a third
        #: of the work of a call before the GPU begins (3 of 8 ms for a picture).
        self._planned: tuple[Hashable, ExecutionContext] | None = None
        #: Chunks of the latest run that were replayed from graphs, and all of its chunks.
        self.replayed = (0, 0)
        #: The reason for which none was replayed, if so.
        self.no_graphs: str | None = None

    def aside(self, plan: Plan, device: torch.device) -> AbstractContextManager[None]:
        """Return the context in which a run's work must be queued if its chunks may be recorded."""
        return nullcontext() if self._why_none(plan, device) else aside(device)

    def _why_none(self, plan: Plan, device: torch.device) -> str | None:
        return why_none(self._wanted, plan, self.rate) or why_not_on(device)

    @contextmanager
    def run(
        self, make: Callable[[], ExecutionContext], network: object, size: tuple[Hashable, ...], plan: Plan,
        guard: Guard
    ) -> Iterator[tuple[ExecutionContext, Graphs | None]]:
        """Hold an ExecutionContext with its memory, and its graphs if its chunks may be recorded. Use it inside
        `aside`.

        Args:
            make: plans the ExecutionContext.
            network, size: all that distinguishes one ExecutionContext from another, with the kernels that run now; the
                previous one is used again if they are the same.
            plan: the plan of the call.
            guard: frees memory, and keeps the clip if memory runs out.

        Yields: the ExecutionContext, and its graphs or None.
        """
        size = *size, target(guard.device)  # what is recorded launches these kernels
        key = network, *size, plan.parking
        self.replayed, self.no_graphs = (0, 0), self._why_none(plan, guard.device)
        graphs = self._kept(guard.device, None if self.no_graphs else key)
        planned, self._planned = self._planned, None
        if graphs is None:
            run = planned[1] if planned is not None and planned[0] == key else make()
        if self.no_graphs:
            with allocated(run, guard):
                yield run, None
            self._planned = key, run
            return
        if graphs is None:
            graphs = Graphs(run, self._notes[(type(network), *size)], key)
        graphs.begin()
        try:
            with allocated(graphs.run, guard, graphs.worth_keeping):
                yield graphs.run, graphs
        except BaseException:
            graphs.clear()
            raise
        self.replayed, self.no_graphs = (graphs.replayed, graphs.chunks), graphs.why_none()
        self._planned = key, graphs.run
        if graphs.run.allocated:
            self._latest = graphs
            KEPT.keep(graphs)
        else:
            graphs.clear()

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
        latest, self._latest, self._planned = self._latest, None, None
        if latest is not None and KEPT.take(latest.device, latest):
            latest.free()


@contextmanager
def allocated(run: ExecutionContext, guard: Guard, keep: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Hold the run's memory inside, and free it afterwards, unless all went well and `keep` returns True.

    If memory runs out between two chunks, the guard keeps the clip as it stands."""
    run.relieve = guard.relieve_operator
    stays = False
    try:
        if run.allocated:
            run.recover()
        else:
            free_cached(guard.device, run)
            run.allocate()
        yield
        stays = keep()
    except Exception as error:
        if out_of_memory(error):
            guard.keep(lambda: hand_over(run))
        raise
    finally:
        run.rest()
        if not stays:
            run.free()
