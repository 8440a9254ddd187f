"""State of a device: a thread's current device, extra streams, caches of memory, and waiting for its work.

It exists once per device where work is spread over several. Caches and waits concern a whole device or process, and so
must not coincide with another thread's recording."""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

#: Held while launches are being recorded: meanwhile torch refuses to empty its cache in any thread, and a wait for the
#: whole device may break the recording off.
RECORDING = threading.RLock()
#: The last owner that took memory of a GPU.
_owners: dict[torch.device, weakref.ref[object]] = {}


def empty_device_cache() -> None:
    """Free the unused memory that torch has reserved on all GPUs."""
    with RECORDING:
        torch.cuda.empty_cache()


class Counters(NamedTuple):
    """torch's counters of its memory on a GPU: bytes allocated and reserved now, the most of each so far, and the
    number of requests that it could not meet."""

    allocated: int
    reserved: int
    most_allocated: int
    most_reserved: int
    failures: int


def counters(device: torch.device) -> Counters:
    """Read torch's counters for a GPU. torch's functions for a single one also read all, and sort them each time."""
    found = torch.cuda.memory_stats_as_nested_dict(device)  # empty before CUDA's first use
    allocated, reserved = (found.get(f"{kind}_bytes", {}).get("all", {}) for kind in ("allocated", "reserved"))
    return Counters(
        allocated.get("current", 0), reserved.get("current", 0), allocated.get("peak", 0), reserved.get("peak", 0),
        found.get("num_ooms", 0),
    )  # fmt: skip


def gaps(device: torch.device) -> int:
    """Return the unused bytes that torch keeps reserved on a GPU, in segments of which a part is in use; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    empty_device_cache()
    now = counters(device)
    return now.reserved - now.allocated


def free_cached(device: torch.device, owner: object) -> None:
    """Empty torch's cache before `owner` takes memory of a GPU, if another one took memory before.

    Cached blocks fit the requests they were cut for, so the reserved memory would grow to the sum of both (13.3 GB for
    two alternating decodes that take 7.3 each)."""
    before = _owners.get(device)
    if before is None or before() is not owner:
        _owners[device] = weakref.ref(owner)
        if keeps_blocks(device):
            empty_device_cache()


def allocator(device: torch.device) -> str:
    """Return who hands out a device's memory: "native" (torch), "expandable" (torch, in segments that grow),
    "cudaMallocAsync" (the driver), or "" without CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    backend = torch.cuda.get_allocator_backend()
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable" if backend == "native" and "expandable_segments:True" in settings else backend


def keeps_blocks(device: torch.device) -> bool:
    """Check whether memory that torch frees on a device stays reserved in blocks too small for larger requests.

    That holds for GPUs, unless torch's segments are expandable."""
    return allocator(device) in ("native", "cudaMallocAsync")


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU."""
    with RECORDING:
        torch.cuda.synchronize(device)


def empty_host_cache() -> None:
    """Free the page-locked host memory that torch keeps for later copies. Old versions of torch cannot."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` this thread's current one inside, if it is a GPU with a number; the previous one comes back."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext()


def numbered(device: torch.device) -> torch.device:
    """Return the device with its number, so that it is the same in every thread; without one it is the current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


_Streams = dict[torch.device, torch.cuda.Stream]
#: Streams of threads that have ended.
_idle: defaultdict[torch.device, deque[torch.cuda.Stream]] = defaultdict(deque)


class _Own(threading.local):
    """A thread's streams.

    When it ends, later threads take them over, because memory that torch reserved for one stream serves no other."""

    def __init__(self) -> None:
        self._streams: _Streams = {}
        weakref.finalize(threading.current_thread(), _give_back, self._streams)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            try:
                self._streams[device] = _idle[device].pop()
            except IndexError:
                self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _give_back(streams: _Streams) -> None:
    for device, stream in streams.items():
        _idle[device].append(stream)


_own = _Own()
_uploads: dict[torch.device, torch.cuda.Stream] = {}


def uploads(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all threads copy host memory to a GPU.

    Memory that torch has reserved for copies of one stream serves no other, so with a stream for every call each would
    reserve its own."""
    device = numbered(device)
    return _uploads.get(device) or _uploads.setdefault(device, torch.cuda.Stream(device))


def uploaded(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of host memory on a GPU. Later work of the current stream waits for it; the caller does
    not where the memory is page-locked."""
    current, copies = torch.cuda.current_stream(device), uploads(device)
    with torch.cuda.stream(copies):
        there = part.to(device, non_blocking=True)
    current.wait_stream(copies)
    there.record_stream(current)
    return there


#: Pairs of streams that no run uses at present.
_pairs: defaultdict[torch.device, deque[tuple[torch.cuda.Stream, torch.cuda.Stream]]] = defaultdict(deque)


def lend_copies(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return two streams for copies from and to host memory during a run, until `return_copies`.

    One run after the other gets the same pair. A GPU keeps all streams in a few queues (8, unless
    CUDA_DEVICE_MAX_CONNECTIONS is set), and a copy waits for earlier kernels in its own queue. These streams have
    another priority than computation, and so are in other queues."""
    try:
        return _pairs[device].pop()
    except IndexError:
        return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Queue copies on a stream of their own, behind the work that the current stream has by now; nothing waits for
    them. Tensors that they read must live on until they are done."""
    current, pair = torch.cuda.current_stream(device), lend_copies(device)
    pair[0].wait_stream(current)
    try:
        with torch.cuda.stream(pair[0]):
            yield
    finally:
        return_copies(device, pair)


def return_copies(device: torch.device, pair: tuple[torch.cuda.Stream, torch.cuda.Stream]) -> None:
    """Take back a pair of streams; whoever gets it next waits for what is queued."""
    _pairs[device].append(pair)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Work on a stream of this thread's own, because the default stream cannot be recorded.

    Its work begins after that of the current stream, which goes on after it."""
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    stream = _own.stream(current.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)
