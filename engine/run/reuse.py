"""The memory of fused runs: when a run gets it, gives it back, or leaves it to the next run with its graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .devices import aside, make_way
from .graph_rule import Notes
from .graphs import Graphs, why_none, why_not_on
from .guard import Guard
from .handover import hand_over
from .kept import KEPT
from .plan import Plan
from .pressure import out_of_memory
from .run import Run


class Runs:
    """One after the other. The latest one's memory stays where another call would gain from its graphs, until `forget`
    or until anyone asks for what is KEPT."""

    def __init__(self, graphs: bool, rate: int = 4) -> None:
        """graphs: whether chunks may be recorded. rate: frames of a latent, at most. What runs before these have left
        goes."""
        KEPT.release()
        self._wanted, self.rate = graphs, rate
        self._notes: defaultdict[Hashable, Notes] = defaultdict(Notes)
        self._latest: Graphs | None = None
        #: What distinguishes the latest Run from others, and it, without its memory: to plan it anew is a third of what
        #: a call does before the GPU has work (3 of 8 ms for a picture).
        self._planned: tuple[Hashable, Run] | None = None
        #: Chunks of the latest run that were replayed from graphs, and all of its chunks.
        self.replayed = (0, 0)
        #: Why none was replayed, if so.
        self.no_graphs: str | None = None

    def aside(self, plan: Plan, device: torch.device) -> AbstractContextManager[None]:
        """Where a run's work has to be queued if its chunks may be recorded."""
        return nullcontext() if self._why_none(plan, device) else aside(device)

    def _why_none(self, plan: Plan, device: torch.device) -> str | None:
        return why_none(self._wanted, plan, self.rate) or why_not_on(device)

    @contextmanager
    def run(
        self, make: Callable[[], Run], network: object, size: tuple[Hashable, ...], plan: Plan, guard: Guard
    ) -> Iterator[tuple[Run, Graphs | None]]:
        """The Run that `make` plans, with its memory, and its graphs if its chunks may be recorded; inside `aside`.

        network, size: all that distinguishes one Run from another; the one before is used again where it is the same.
        """
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
        """What the latest call left, if it is still there and for the same Run; no memory of another one stays."""
        latest, self._latest = self._latest, None
        there = KEPT.take(device, latest)
        if latest is None or (there and latest.key == key):
            return latest
        latest.notes.lose()
        if there:
            latest.free()
        return None

    def forget(self) -> None:
        """Give back what stayed: the weights that graphs read are about to go."""
        for notes in list(self._notes.values()):
            notes.forget()
        latest, self._latest, self._planned = self._latest, None, None
        if latest is not None and KEPT.take(latest.device, latest):
            latest.free()


@contextmanager
def allocated(run: Run, guard: Guard, keep: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """The run's memory, given back whatever happens, but for a good end after which `keep` wants it to stay. Where
    memory runs out between two chunks, the guard keeps the clip as it stands."""
    run.relieve = guard.relieve_operator
    stays = False
    try:
        if run.allocated:
            run.recover()
        else:
            make_way(guard.device, run)
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
