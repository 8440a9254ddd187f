"""Lifetime of the memory of fused runs: allocation and release, or what records their chunks keeps it for the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.targets import target
from ..planning.plan import Plan, why_none
from ..runtime.context import ExecutionContext
from ..runtime.handover import hand_over
from ..runtime.kept import KEPT
from ..runtime.pressure import out_of_memory
from ..system.devices import aside, free_cached
from ..system.extension import provider
from .guard import Guard

#: Launches depend on a frame's place in its clip only up to this count: first frame, second, or later.
SETTLED = 2


class Replay(Protocol):
    """An ExecutionContext whose chunks are recorded and replayed; results equal those of the launches, bit by bit.

    chunks, replayed: of the present call."""

    run: ExecutionContext
    chunks: int
    replayed: int

    def chunk(self, walk: Callable[[Tensor], Tensor], part: Tensor, left: int, alone: bool = False) -> Tensor:
        """Return walk(part), launched or replayed; the result is valid until the next call.

        Args:
            walk: the same function of the run and its argument every time.
            part: the chunk's input.
            left: how often at least such a chunk comes in this call, this one included.
            alone: the call has no other chunk.
        """

    def why_none(self) -> str | None:
        """Return the reason why no chunk of this call was replayed, or None."""


class Recorder(Protocol):
    """The class of the point "replay", whose module also has why_not_on(device): why a GPU can record nothing."""

    def run(
        self, make: Callable[[], ExecutionContext], key: Hashable, alike: Hashable, guard: Guard
    ) -> AbstractContextManager[Replay]:
        """Hold a run with its memory, which may stay for the next one.

        Args:
            make: returns the ExecutionContext without its memory.
            key: equal for runs that may use the latest one's ExecutionContext.
            alike: equal for runs whose chunks take as long.
            guard: as in `Runs.run`.
        """

    def drop(self, device: torch.device) -> None:
        """Free the memory that is kept on a device, for a run that records nothing."""

    def forget(self) -> None:
        """Free the kept memory, because the weights that recordings read are about to go."""


def why_not_on(device: torch.device) -> str | None:
    """Return the reason why a device has no graphs, or None."""
    if device.type != "cuda":
        return "only CUDA GPUs replay graphs"
    replay = provider("replay")
    return "nothing here records them" if replay is None else replay.why_not_on(device)


def chunks_left(clips: int, latents: int, done: int, chunk: int) -> int:
    """Return how often at least a chunk of `chunk` latents comes in a call, this one included.

    Args:
        clips: clips that follow this one.
        latents: of each clip.
        done: latents of this clip before the chunk.
        chunk: latents per chunk.
    """
    return (1 + clips) * (1 if done < SETTLED else (latents - done) // chunk)


class Runs:
    """Runs one after the other."""

    def __init__(self, graphs: bool, rate: int = 4) -> None:
        """Free memory that earlier runs have kept.

        Args:
            graphs: chunks may be recorded.
            rate: largest number of frames per latent.
        """
        KEPT.release()
        self._wanted, self.rate = graphs, rate
        #: None before the first run whose chunks may be recorded.
        self._recorder: Recorder | None = None
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
    ) -> Iterator[tuple[ExecutionContext, Replay | None]]:
        """Hold an ExecutionContext with its memory, and what replays its chunks if they may be recorded. Use it inside
        `aside`.

        Args:
            make: plans the ExecutionContext.
            network, size: all that distinguishes one ExecutionContext from another, with the kernels that run now; the
                previous one is used again if they are the same.
            plan: the plan of the call.
            guard: frees memory, and keeps the clip if memory runs out.

        Yields: the ExecutionContext, and what replays its chunks or None.
        """
        size = *size, target(guard.device)  # what is recorded launches these kernels
        key, planned, self._planned = (network, *size, plan.parking), self._planned, None
        self.replayed, self.no_graphs = (0, 0), self._why_none(plan, guard.device)

        def planned_or_made() -> ExecutionContext:
            return planned[1] if planned is not None and planned[0] == key else make()

        if self.no_graphs:
            if self._recorder is None:
                KEPT.release(guard.device)
            else:
                self._recorder.drop(guard.device)
            run = planned_or_made()
            with allocated(run, guard):
                yield run, None
        else:
            self._recorder = self._recorder or provider("replay").Recorder()
            with self._recorder.run(planned_or_made, key, (type(network), *size), guard) as graphs:
                yield graphs.run, graphs
            run = graphs.run
            self.replayed, self.no_graphs = (graphs.replayed, graphs.chunks), graphs.why_none()
        self._planned = key, run

    def forget(self) -> None:
        """Free the kept memory, because the weights that graphs read are about to go."""
        self._planned = None
        if self._recorder is not None:
            self._recorder.forget()


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
