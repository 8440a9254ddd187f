"""Execute clips or tiles of one size on a fused component, one after the other, in the memory of one Run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from ..network.fused import Emit, Fused
from ..network.steps import with_chunks
from ..runtime.graph_rule import chunks_left
from ..runtime.graphs import Graphs
from ..runtime.handover import Handover, take_over
from ..runtime.run import Run
from .passes import Clips, Gathers, Part
from .passes import Emit as EmitResults


class FusedPass:
    """A Pass of execution/clip.py: clips or tiles of one size in the memory of one Run."""

    def __init__(
        self, network: Fused, clips: Clips, memory: Callable[[], AbstractContextManager[tuple[Run, Graphs | None]]],
        load: Callable[[Tensor], Tensor], step: Callable[[Run, Tensor, Emit, bool], None],
        replay: Callable[[Run, Tensor], Tensor] | None = None,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext, steps: slice = slice(None), *,
        before: Callable[[Run, Tensor, Part], Tensor] | None = None,
        after: Callable[[Run, Tensor, Part, Emit], None] | None = None,
    ) -> None:  # fmt: skip
        """Bind the callables of one pass.

        Args:
            load: moves a part's data to the device in the form that `step` takes.
            step: step(run, data, emit, ends) executes a chunk; `ends` says that the clip ends with it.
            replay: the same for graphs, for chunks whose results are one tensor and either do not end the clip or
                belong to a network that does not look ahead; None: no later attempt can continue where this one stops.
            aside: as in Pass.
            steps: the steps of the network that this pass executes.
            before: before(run, data, part) returns the data that `step` takes of the part, for networks that see a
                whole clip with its first part.
            after: after(run, results, part, emit) handles results that are not emitted at once.
        """
        self.gathers: Gathers = "" if before is after else "first" if after is None else "last"
        self._before, self._after = before, after
        self._network, self._steps = network, steps
        self._clips = clips
        self._memory = memory
        self._load = load
        self._step = step
        self._replay = replay
        self.aside = aside

    @contextmanager
    def memory(self) -> Iterator[None]:
        with self._memory() as (self._run, self._graphs):
            self._whole = None if self._graphs is None else functools.partial(self._replay, self._run)
            yield

    def begins(self, first: int) -> tuple[int, ...]:
        return self._begins(first)[self._steps]

    def _begins(self, first: int) -> tuple[int, ...]:
        program = self._clips.half.program
        return with_chunks(self._network.begins(first), self._clips.guard.chunks, program.cycle)

    def begin(self, clip: int, first: int, left: Handover | None) -> tuple[int, int]:
        self._later = self._clips.batch - clip - 1
        if left is None or not take_over(self._run, left):
            self._network.start(self._run, self._begins(first), self._steps)
        done = self._run.done
        if self.gathers == "last":
            return done["latents"], 0
        return done["latents"], done["frames" if self._clips.half.program.half == "decoder" else "latents"]

    def chunks(self, parts: Iterable[Part], emit: EmitResults) -> Iterator[None]:
        run, graphs, guard, resumes = self._run, self._graphs, self._clips.guard, self._replay is not None

        def deliver(results: Tensor) -> None:
            emit(results, run.health)

        def give(results: Tensor) -> None:
            if self._after is None:
                deliver(results)
            else:
                self._after(run, results, part, deliver)

        for part in parts:
            data = run.attempt(self._load, part.data)
            if self._before is not None:
                data = self._before(run, data, part)
            ends = part.end == self._clips.latents
            step = functools.partial(self._step, run, data, give, ends)
            run.scout(step, ends)
            with run.chunk() if resumes else nullcontext():
                if graphs is None or (ends and run.after) or not self._network.whole(run):
                    step()
                else:
                    left = chunks_left(self._later, self._clips.latents, part.first, part.end - part.first)
                    give(graphs.chunk(self._whole, data, left))
            data = step = None  # before the next part needs as much
            yield
            if resumes and run.pressed:
                guard.settle(run.recover)
