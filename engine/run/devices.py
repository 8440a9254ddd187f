"""What belongs to a device: which one is a thread's current, the streams beside its default one, its caches of memory,
and waiting for it. Where work is spread over several devices, this is what there is one of for each.

Caches and waits concern a whole device or process, and so must not meet another thread's recording.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

#: Held while launches are being recorded: in whichever thread, torch refuses to empty its cache then, and a wait for
#: the whole device may break the recording off.
RECORDING = threading.RLock()
#: Who took memory of a GPU last.
_owners: dict[torch.device, weakref.ref[object]] = {}


def empty_device_cache() -> None:
    """Give back what torch has reserved on all GPUs and nobody uses."""
    with RECORDING:
        torch.cuda.empty_cache()


def gaps(device: torch.device) -> int:
    """Bytes that torch keeps reserved on a GPU although nobody uses them: the gaps in segments of which a part is in
    use. On a CPU there are none."""
    if device.type != "cuda":
        return 0
    empty_device_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def make_way(device: torch.device, owner: object) -> None:
    """Before `owner` takes memory of a GPU: what another left in torch's cache goes, since blocks fit who cut them, and
    what is reserved would grow to the sum of both (13.3 GB for two decodes in turns that take 7.3 each)."""
    before = _owners.get(device)
    if before is None or before() is not owner:
        _owners[device] = weakref.ref(owner)
        if keeps_blocks(device):
            empty_device_cache()


def keeps_blocks(device: torch.device) -> bool:
    """Whether what torch frees on a device stays reserved in the blocks into which it was cut, where larger requests
    find no room: its own allocator for GPUs, unless its segments may grow."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return torch.cuda.get_allocator_backend() == "native" and "expandable_segments:True" not in settings


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU."""
    with RECORDING:
        torch.cuda.synchronize(device)


def empty_host_cache() -> None:
    """Give back the page-locked host memory that torch keeps for copies to come. Old versions of torch cannot."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()


def current(device: torch.device) -> AbstractContextManager[object]:
    """`device` is this thread's current one inside, if it is a GPU that has a number; the thread's own comes back."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext()


def numbered(device: torch.device) -> torch.device:
    """One and the same, whatever thread it will be used in: a GPU without a number is this thread's current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


_Streams = dict[torch.device, torch.cuda.Stream]
#: Of threads that have ended.
_idle: defaultdict[torch.device, deque[torch.cuda.Stream]] = defaultdict(deque)


class _Own(threading.local):
    """A thread's streams. When it ends they are for others: what torch has reserved for one stream serves no other."""

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
    """The stream on which host memory is copied to a GPU, whatever thread asks: what torch has reserved for copies of
    one stream serves no other, and with a stream for every call each would reserve its own."""
    device = numbered(device)
    return _uploads.get(device) or _uploads.setdefault(device, torch.cuda.Stream(device))


#: Pairs that no run has at present.
_pairs: defaultdict[torch.device, deque[tuple[torch.cuda.Stream, torch.cuda.Stream]]] = defaultdict(deque)


def lend_copies(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two streams for copies from and to host memory beside a run's work, until `return_copies`: one run after the
    other has the same. A GPU keeps all streams in a few queues (8, where CUDA_DEVICE_MAX_CONNECTIONS says nothing), and
    a copy waits for the kernels in front of it in its own; these are of another priority than what computes, and so in
    other queues."""
    try:
        return _pairs[device].pop()
    except IndexError:
        return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)


def return_copies(device: torch.device, pair: tuple[torch.cuda.Stream, torch.cuda.Stream]) -> None:
    """All that was queued on them is done."""
    _pairs[device].append(pair)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On a stream of this thread's own: the default one cannot be recorded. Its work begins after that of the current
    stream, which goes on after it."""
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
