"""Peak memory of a torch program: run it on the meta device and follow every storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels import exact
from .allocator import Allocator, Block
from .layouts import IN_PLACE, result

T = TypeVar("T")


class _Functions(TorchFunctionMode):
    """Replace attention by its output alone, as fused kernels need no score matrix (the meta device would build it).

    products: also replace convolutions by matrix products, as fp32 computes them on a GPU."""

    def __init__(self, products: bool) -> None:
        super().__init__()
        self._others: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: _lean_attention}
        if products:
            self._others[F.conv3d] = _as_products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._others.get(func, func)(*args, **(kwargs or {}))


def _lean_attention(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(q)


def _as_products(*args: Any) -> Tensor:
    return exact.conv3d(*args[:5], taps=1)


#: Calls inside `unseen` bypass _Functions, except those inside `seen`: each query of a size would take 4 us, and a dry
#: run makes four of them per step.
unseen, seen = torch._C.DisableTorchFunction, torch._C._EnableTorchFunction

_aten = torch.ops.aten


class Event(NamedTuple):
    """Allocation (`takes`) or release of a storage's bytes.

    number: of the storage; None: workspace of a convolution while it runs. own: the storage was made since the record
    began."""

    number: int | None
    size: int
    takes: bool = True
    own: bool = True


class _Follow(TorchDispatchMode):
    """Count the bytes of live storages, and pass their requests to an allocator model.

    Convolutions also hold a re-laid-out input, weight and output while they run."""

    def __init__(self, allocator: Allocator | None) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.allocator = allocator
        self._holders: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        #: Live storages -> their numbers, in the order in which they were made.
        self.numbers: dict[int, int] = {}
        self._made = 0
        self.events: list[Event] | None = None
        self._first = 0
        self._held: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or torch imports its compiler to make it skip this mode: 1.2 s of CPU, 10 us an operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if id(func) in IN_PLACE:
            return args[0]
        with unseen():
            return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = result(func, args, kwargs)
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor):
                self._hold(made)
        extra = 0
        if func is _aten.convolution.default:
            extra = _nbytes(args[0]) + _nbytes(args[1]) + _nbytes(out)
            self._note(None, extra)
            if self.allocator is not None:
                self.allocator.touch(extra)
        self.peak = max(self.peak, self.live + extra)
        return out

    def record(self) -> list[Event]:
        """Start a new list of events; it grows until the next record, or until `events` is set to None."""
        self.events, self._first = [], self._made
        return self.events

    def _note(self, number: int | None, size: int, takes: bool = True) -> None:
        if self.events is not None:
            self.events.append(Event(number, size, takes, number is None or number >= self._first))

    def follow(
        self, events: Iterable[tuple[Event, Any]], drop: Callable[[Any], object]
    ) -> dict[int, Block | None]:
        """Replay events without tensors; return the blocks taken and not given back, by storage number.

        Events that come with a `what` are about a storage older than the record: drop(what) releases it instead."""
        taken: dict[int, Block | None] = {}
        allocator, live, peak = self.allocator, self.live, self.peak
        for (number, size, takes, _), what in events:
            if what is not None:
                self.live = live
                drop(what)
                live = self.live
            elif not takes:
                live -= size
                given = taken.pop(number)
                if given is not None:
                    allocator.give(given)
            else:
                if live + size > peak:
                    peak = live + size
                if number is not None:
                    live += size
                    taken[number] = allocator.take(size) if allocator is not None and size else None
                elif allocator is not None:
                    allocator.touch(size)
        self.live, self.peak = live, peak
        return taken

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._holders:
            self._note(self._made, size)
            self.live += size
            self._lies(key, self.allocator.take(size) if self.allocator is not None and size else None)
        self._held_by(tensor, key, size)

    def lay(self, tensor: Tensor, given: Block | None) -> None:
        """Put a new tensor's storage into a block that `follow` has taken and counted already."""
        storage = tensor.untyped_storage()
        self._lies(storage._cdata, given)
        self._held_by(tensor, storage._cdata, storage.nbytes())

    def _lies(self, key: int, given: Block | None) -> None:
        self._holders[key] = 0
        self.numbers[key] = self._made
        self._made += 1
        if given is not None:
            self._blocks[key] = given

    def _held_by(self, tensor: Tensor, key: int, size: int) -> None:
        self._holders[key] += 1
        ref = weakref.ref(tensor, self._release)
        self._held[id(ref)] = ref, key, size

    def _release(self, ref: weakref.ref[Tensor]) -> None:
        _, key, size = self._held.pop(id(ref))
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self._note(self.numbers.pop(key), size, takes=False)
            self.live -= size
            if key in self._blocks:
                self.allocator.give(self._blocks.pop(key))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class PeakMemory:
    """Measure the peak memory of tensors made inside: `with PeakMemory() as m: program()`, then `m.peak` in bytes."""

    def __init__(self, products: bool = False, reserves: bool = False) -> None:
        """Choose the way to count.

        Args:
            products: convolutions are matrix products (engine/kernels/exact.py).
            reserves: `peak` is the memory that torch's caching allocator reserves; False: in use.
        """
        self._follow = _Follow(Allocator() if reserves else None)
        self._modes = [_Functions(products), self._follow]

    def __enter__(self) -> PeakMemory:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, value, trace)

    @property
    def peak(self) -> int:
        """Return the peak in bytes: reserved where an allocator is modelled, else in use."""
        allocator = self._follow.allocator
        return max(self._follow.peak, 0 if allocator is None else allocator.reserved)

    @property
    def live(self) -> int:
        """Return the largest number of bytes in use, whatever is reserved for them."""
        return self._follow.peak

    def above(self, work: Callable[[], T]) -> tuple[T, int]:
        """Return the result of work(), and the largest number of bytes that it adds to those already in use."""
        follow = self._follow
        before, start = follow.peak, follow.live
        follow.peak = start
        result = work()
        more, follow.peak = follow.peak - start, max(before, follow.peak)
        return result, more

    def need(self, more: int) -> None:
        """Count work that adds at most `more` bytes to those in use, without doing it."""
        self._follow.peak = max(self._follow.peak, self._follow.live + more)

    def number(self, tensor: Tensor) -> int:
        """Return the number of the tensor's storage, -1 where it was not made inside."""
        return self._follow.numbers.get(tensor.untyped_storage()._cdata, -1)

    @contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Record the allocations and releases inside."""
        try:
            yield self._follow.record()
        finally:
            self._follow.events = None

    def follow(
        self, events: Iterable[tuple[Event, Any]], drop: Callable[[Any], object]
    ) -> dict[int, Block | None]:
        """Replay recorded events; drop(what) releases a storage that is older than the record.

        Returns:
            The blocks taken and not given back, by the numbers of their storages in the record.
        """
        return self._follow.follow(events, drop)

    def lay(self, made: Tensor, given: Block | None) -> Tensor:
        """Return `made` with its storage placed in a block that `follow` has taken."""
        self._follow.lay(made, given)
        return made


def peak_bytes(program: Callable[[], Any], memory: PeakMemory | None = None) -> int:
    """Return the peak bytes of the tensors that `program` makes on the meta device, as `memory` counts them."""
    # Under a caller's inference mode, as ComfyUI's, composite operators would arrive whole, without their temporaries.
    with torch.inference_mode(False), torch.no_grad(), memory or PeakMemory() as memory:
        program()
    return memory.peak
