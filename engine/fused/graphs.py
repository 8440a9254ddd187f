"""CUDA graphs of a run's chunks: one that comes again is replayed in one call instead of hundreds of launches.

A graph repeats its launches with the arguments they were recorded with. Memory stays where it is as long as the Run
has it; what is left to change from chunk to chunk is the input, which is copied to where the recorded one was; the
clip's first frames, which have weights of their own; and the slots of the rings. So a chunk is replayed where its size
and the clip's progress, as far as launches depend on it, are as they were, and each one begins at slot 0 of every ring
(Ring.rewind): the histories are copied there, at the end of the graph itself.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from .. import log
from ..kernels.observe import listening
from .run import Run

if TYPE_CHECKING:
    from ..runtime.plan import Plan

T = TypeVar("T")
#: A graph pays where the host needs longer for a chunk's launches than this share of the GPU's time for it: from there
#: on the GPU waits, or would if something else keeps the host busy for as long.
HOST_SHARE = 0.5
#: Of each frame within its clip, launches know only whether it is the first one, the second or a later one.
SETTLED = 2
#: What recording takes: cuBLAS's workspace for a second stream (32 MiB on an H200), operators' temporaries in a pool
#: of their own, and the graphs themselves.
GRAPH_BYTES = 64 << 20
#: Chunks of more different kinds than this are launched as ever.
MOST_GRAPHS = 8


def one_step(latents: int, frames: int) -> bool:
    """Whether a chunk's frames go through the highest resolutions at once; arguments as in Steps."""
    return not frames or frames >= 4 * latents


def why_none(wanted: bool, plan: Plan) -> str | None:
    """The reason why the chunks of a plan are not recorded, or None."""
    if not wanted:
        return "switched off"
    if plan.tiled:
        return "blended tiles are not recorded"
    if plan.parking is not None:
        return "histories come from host memory and go back in every chunk"
    if not one_step(plan.steps.latents, plan.steps.frames):
        return "a chunk's frames go through in several steps"
    return None


def why_not_on(device: torch.device) -> str | None:
    """The reason why a device has no graphs, or None."""
    return None if device.type == "cuda" else "only CUDA GPUs replay graphs"


#: Graphs that must not be destroyed.
_BROKEN: list[torch.cuda.CUDAGraph] = []


class CudaGraph:
    """What one chunk launches."""

    def __init__(self, device: torch.device, pool: object) -> None:
        """pool: where temporaries are allocated. Graphs that share it must not run at the same time."""
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

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
            # CUDA has broken the recording off, and torch's allocators do not know it: they would ask this graph which
            # stream it records, and refuse to empty their cache.
            _BROKEN.append(self._graph)
            names = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"
            end = next((getattr(torch._C, n) for n in names if hasattr(torch._C, n)), None)
            if end is not None:
                with suppress(RuntimeError):  # they know it after all
                    end(torch.cuda.current_device(), self._pool)

    def replay(self) -> None:
        self._begin.record()
        self._graph.replay()
        self._end.record()

    def milliseconds(self) -> float | None:
        """The GPU's time for the latest replay; None while it runs."""
        return self._begin.elapsed_time(self._end) if self._end.query() else None


@dataclass
class Notes:
    """What the runs of one plan have shown: the kinds of chunks whose kernels are compiled, and why there is no use in
    recording them, if so."""

    seen: set[Hashable] = field(default_factory=set)
    off: str | None = None


@dataclass
class _Recorded:
    """A chunk's graph with its input and result, and what the chunk changes besides memory."""

    graph: CudaGraph
    part: Tensor
    result: Tensor
    done: Counter[str]
    marks: list[tuple[int, frozenset[str]]]
    #: Of the host for all launches.
    milliseconds: float
    judged: bool = False


class Graphs:
    """A Run and the graphs of its chunks. Kinds of chunks are recorded when they come the second time: by then their
    kernels are compiled and libraries have their workspaces. Results are those of the launches, bit by bit."""

    def __init__(self, run: Run, notes: Notes, key: Hashable) -> None:
        """key: tells runs that may take each other's place from those that may not."""
        self.run = run
        self.key = key
        self.device = run.device
        #: Chunks since `begin`, and how many of them were replayed.
        self.chunks = 0
        self.replayed = 0
        self._notes = notes
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool: object = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device, operators' temporaries aside."""
        return self.run.nbytes + sum(r.part.nbytes for r in self._recorded.values())

    def begin(self) -> None:
        """A new call."""
        self.chunks = self.replayed = 0

    def chunk(self, walk: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        """walk(part), launched or replayed; the result is valid until the next call. `walk` is the same function of the
        run and its argument every time."""
        self._judge()
        self.chunks += 1
        notes, kind = self._notes, self._kind(part)
        if notes.off or listening():
            return walk(part)
        if kind not in self._recorded:
            if kind in notes.seen and len(self._recorded) < MOST_GRAPHS:
                self._record(kind, walk, part)
            if kind not in self._recorded:
                result = walk(part)
                notes.seen.add(kind)
                return result
        return self._replay(self._recorded[kind], walk, part)

    def why_none(self) -> str | None:
        """The reason why no chunk since `begin` was replayed, or None."""
        if self.replayed:
            return None
        return self._notes.off or "no chunk came a second time"

    def worth_keeping(self) -> bool:
        """At the end of a call: whether another one would gain from this run's memory and graphs."""
        self._judge()
        return bool(self._recorded)

    def clear(self) -> None:
        """Forget the graphs."""
        if self._recorded and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._recorded.clear()
        self._pool = None

    def free(self) -> None:
        """Give everything back."""
        self.clear()
        self.run.free()

    # -- one chunk -------------------------------------------------------------------------------------------------

    def _kind(self, part: Tensor) -> Hashable:
        """All that a chunk's launches depend on, besides memory and the slots of the rings."""
        run = self.run
        progress = tuple(sorted((name, min(count, SETTLED)) for name, count in run.done.items()))
        begun = tuple(len(ring.mark[1]) for ring in run.rings.values())
        return tuple(part.shape), part.stride(), part.dtype, progress, begun

    def _record(self, kind: Hashable, walk: Callable[[Tensor], Tensor], part: Tensor) -> None:
        run = self.run
        run.rewind()
        done, marks = run.done.copy(), self._marks
        run.recording = True
        try:
            if self._pool is None and self.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            given, graph = torch.empty_like(part), CudaGraph(self.device, self._pool)

            def work() -> tuple[Tensor, float]:
                start = time.perf_counter()
                result = walk(given)
                run.rewind()
                return result, 1e3 * (time.perf_counter() - start)

            result, spent = graph.record(work)
            change = run.done.copy()
            change.subtract(done)
            self._recorded[kind] = _Recorded(graph, given, result, change, self._marks, spent)
        except Exception as error:
            self._give_up(error)
        finally:
            run.recording = False
            # Nothing has run yet.
            run.done, self._marks = done, marks

    def _replay(self, recorded: _Recorded, walk: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        self.run.rewind()
        try:
            recorded.part.copy_(part)
            recorded.graph.replay()
        except Exception as error:  # the launch finds no memory
            self._give_up(error)
            return walk(part)
        self.run.done.update(recorded.done)
        self._marks = recorded.marks
        self.replayed += 1
        return recorded.result

    def _judge(self) -> None:
        """Compare the host's time for the launches with the GPU's for their work, when the first replay is over."""
        for recorded in self._recorded.values():
            busy = None if recorded.judged else recorded.graph.milliseconds()
            if busy is None:
                continue
            recorded.judged = True
            if recorded.milliseconds < HOST_SHARE * busy:
                self._notes.off = f"the host launches in {recorded.milliseconds:.1f} ms what keeps the GPU busy for "
                self._notes.off += f"{busy:.1f} ms"
                self.clear()
                return

    def _give_up(self, error: Exception) -> None:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._notes.off = f"recording failed: {reason}"
        log.warn(f"CUDA graphs off: {reason}")
        self.clear()

    @property
    def _marks(self) -> list[tuple[int, frozenset[str]]]:
        return [ring.mark for ring in self.run.rings.values()]

    @_marks.setter
    def _marks(self, marks: list[tuple[int, frozenset[str]]]) -> None:
        for ring, mark in zip(self.run.rings.values(), marks, strict=True):
            ring.mark = mark


_streams = threading.local()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On a stream of this thread's own: the default one cannot be recorded. Its work begins after that of the current
    stream, which goes on after it."""
    if device.type != "cuda":
        yield
        return
    streams, current = vars(_streams), torch.cuda.current_stream(device)
    stream = streams.get(str(current.device)) or torch.cuda.Stream(current.device)
    streams[str(current.device)] = stream
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)
