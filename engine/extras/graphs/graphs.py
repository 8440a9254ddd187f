"""CUDA graphs of a run's chunks: a chunk that comes again is replayed in one call instead of hundreds of launches.

A graph repeats its launches with the arguments they were recorded with. Memory stays in place as long as the
ExecutionContext has it. Three things change from chunk to chunk: the input, which is copied to the place of the
recorded one; the clip's first frames, which have weights of their own; and the slots of the rings. So a chunk is
replayed if its size and the clip's progress, as far as launches depend on it, are as they were when it was recorded,
and each one begins at slot 0 of every ring (Ring.rewind): the histories are copied there, at the end of the graph
itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ... import log
from ...execution.reuse import SETTLED
from ...kernels.observe import listening
from ...runtime.context import ExecutionContext
from ...runtime.pressure import out_of_memory
from ...system.devices import RECORDING, synchronize
from .graph_rule import CALLS, Clock, Notes, kept_bytes, pays

T = TypeVar("T")
#: Largest number of graphs of a run; chunks of further kinds are launched one by one.
MOST_GRAPHS = 8


def why_not_on(device: torch.device) -> str | None:
    """Return the reason why a GPU has no graphs, or None."""
    allocator = torch.cuda.get_allocator_backend()
    if allocator != "native":
        # With torch 2.11 a recording under cudaMallocAsync ended the process.
        return f"recording is safe with torch's own allocator only, and this is {allocator}"
    return None


#: Graphs that must not be destroyed.
_BROKEN: list[torch.cuda.CUDAGraph] = []


class CudaGraph:
    """The recorded launches of one chunk."""

    def __init__(self, device: torch.device, pool: object) -> None:
        """Prepare a graph with temporaries from `pool`. Graphs that share a pool must not run at the same time."""
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._clock = Clock()

    def record(self, work: Callable[[], T]) -> T:
        """Call `work`, whose launches are recorded instead of run, on a stream other than the default one."""
        try:
            # Other threads may use the device meanwhile.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = work()
            self._graph.capture_end()
        except BaseException:
            self._abandon()
            raise
        return result

    def _abandon(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            # CUDA has broken the recording off, and torch's allocators have not noticed: they would ask this graph
            # which stream it records, and refuse to empty their cache.
            _BROKEN.append(self._graph)
            names = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"
            end = next((getattr(torch._C, n) for n in names if hasattr(torch._C, n)), None)
            if end is not None:
                with suppress(RuntimeError):  # they have noticed after all
                    end(torch.cuda.current_device(), self._pool)

    def replay(self) -> None:
        """Run the recorded launches again, timed."""
        self._clock.start()
        self._graph.replay()
        self._clock.stop()

    def milliseconds(self) -> float | None:
        """Return the GPU's time for the latest replay, or None while it runs."""
        return self._clock.milliseconds()


@dataclass
class _Recorded:
    """A chunk's graph with its input and result, and the changes that the chunk makes besides memory."""

    graph: CudaGraph
    part: Tensor
    result: Tensor
    done: Counter[str]
    marks: list[tuple[int, frozenset[str]]]
    replayed: bool = False


class Graphs:
    """An ExecutionContext and the graphs of its chunks; results equal those of the launches, bit by bit.

    A kind of chunk is recorded if its times in earlier chunks say that this pays: by then its kernels are compiled and
    libraries have their workspaces."""

    def __init__(self, run: ExecutionContext, notes: Notes, key: Hashable) -> None:
        """Prepare graphs of `run`. key: equal for runs that may replace each other."""
        self.run = run
        self.key = key
        self.notes = notes
        self.device = run.device
        #: Chunks since `begin`, and the number of them that were replayed.
        self.chunks = 0
        self.replayed = 0
        self._why = ""
        #: The latest chunk is the only one of its call.
        self._alone = False
        #: Why this call records and replays nothing, once it has failed for want of memory; the next one tries again.
        self._full = ""
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool: object = None

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device, without operators' temporaries."""
        return self.run.nbytes + sum(r.part.nbytes for r in self._recorded.values())

    def begin(self) -> None:
        """Start a new call."""
        self.chunks = self.replayed = 0
        self._why, self._full = "no chunk came a second time", ""
        self.notes.calls += 1

    def chunk(self, walk: Callable[[Tensor], Tensor], part: Tensor, left: int, alone: bool = False) -> Tensor:
        """Return walk(part), launched or replayed; the result is valid until the next call.

        Args:
            walk: the same function of the run and its argument every time.
            part: the chunk's input.
            left: as in `pays`, within this call.
            alone: the call has no other chunk.
        """
        self._judge()
        self._alone = alone
        self.chunks += 1
        notes, kind = self.notes, self._kind(part)
        if notes.failed or self._full or listening():
            return walk(part)
        if kind not in self._recorded and self._pays(kind, left):
            self._record(kind, walk, part)
        if kind in self._recorded:
            return self._replay(kind, walk, part)
        return notes.launch(kind, lambda: walk(part), Clock)

    def why_none(self) -> str | None:
        """Return the reason why no chunk since `begin` was replayed, or None."""
        return None if self.replayed else self.notes.failed or self._full or self._why

    def worth_keeping(self) -> bool:
        """Check, at the end of a call, whether another one would gain from this run's memory and graphs."""
        self._judge()
        return self._small and any(pays(self.notes.times.get(kind), CALLS, self._alone) for kind in self._recorded)

    def clear(self) -> None:
        """Drop the graphs."""
        if self._recorded and self.device.type == "cuda":
            synchronize(self.device)
        self._recorded.clear()
        self._pool = None

    def free(self) -> None:
        """Free the graphs and the run's memory."""
        self.clear()
        self.run.free()

    # -- one chunk -------------------------------------------------------------------------------------------------

    def _kind(self, part: Tensor) -> Hashable:
        """Return all that a chunk's launches depend on, besides memory and the slots of the rings."""
        run = self.run
        progress = tuple(sorted((name, min(count, SETTLED)) for name, count in run.done.items()))
        begun = tuple(len(ring.mark[1]) for ring in run.rings.values())
        return tuple(part.shape), part.stride(), part.dtype, progress, begun

    @property
    def _small(self) -> bool:
        return self.nbytes <= kept_bytes(self.device)

    def _pays(self, kind: Hashable, left: int) -> bool:
        notes = self.notes
        if not notes.launched_here(kind) or len(self._recorded) >= MOST_GRAPHS:
            return False
        if notes.lasting and self._small:
            left *= CALLS
        times = notes.times.get(kind)
        if pays(times, left, self._alone):
            return True
        if times is None:
            self._why = "chunks are timed first"
        elif times.gain(self._alone) <= 0:
            spent = times.span if times.busy is None else times.busy
            self._why = f"what the host launches in {times.launching:.1f} ms keeps the GPU busy for {spent:.1f} ms"
        else:
            self._why = "chunks come too seldom to pay for a recording"
        return False

    def _record(self, kind: Hashable, walk: Callable[[Tensor], Tensor], part: Tensor) -> None:
        run = self.run
        run.rewind()
        done, marks = run.done.copy(), self._marks
        run.recording = True
        try:
            if self._pool is None and self.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            with torch.inference_mode(False):  # for the reason given in ExecutionContext.allocate
                given = torch.empty_like(part)
            graph = CudaGraph(self.device, self._pool)

            def work() -> Tensor:
                result = walk(given)
                run.rewind()
                return result

            with RECORDING:
                result = graph.record(work)
            change = run.done.copy()
            change.subtract(done)
            self._recorded[kind] = _Recorded(graph, given, result, change, self._marks)
        except Exception as error:
            self._give_up(error)
        finally:
            run.recording = False
            # Recording has not run anything.
            run.done, self._marks = done, marks

    def _replay(self, kind: Hashable, walk: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        recorded = self._recorded[kind]
        self.run.rewind()
        try:
            recorded.part.copy_(part)
            recorded.graph.replay()
        except Exception as error:  # no memory for the launch
            self._give_up(error)
            return walk(part)
        self.run.done.update(recorded.done)
        self._marks = recorded.marks
        recorded.replayed = True
        self.replayed += 1
        return recorded.result

    def _judge(self) -> None:
        """Note the times of finished replays."""
        self.notes.settle()
        for kind, recorded in self._recorded.items():
            busy = recorded.graph.milliseconds() if recorded.replayed else None
            if busy is not None:
                self.notes.worked(kind, busy)

    def _give_up(self, error: Exception) -> None:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        failed = f"recording failed: {reason}"
        if out_of_memory(error):
            self._full = failed
            log.once(f"CUDA graphs off for a call: {reason}")
        else:
            self.notes.failed = failed
            log.warn(f"CUDA graphs off: {reason}")
        self.clear()

    @property
    def _marks(self) -> list[tuple[int, frozenset[str]]]:
        return [ring.mark for ring in self.run.rings.values()]

    @_marks.setter
    def _marks(self, marks: list[tuple[int, frozenset[str]]]) -> None:
        for ring, mark in zip(self.run.rings.values(), marks, strict=True):
            ring.mark = mark
