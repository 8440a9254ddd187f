"""Peak memory of a torch program: run it on the meta device and follow every storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..extras.plain_memory.allocator import Allocator, Block
from ..extras.plain_memory.layouts import IN_PLACE, result
from ..kernels import exact

T = TypeVar("T")


class _Functions(TorchFunctionMode):
    """Replace attention by its output alone, as fused kernels need no score matrix (the meta device would build it).

    products: also replace convolutions by matrix products, as fp32 computes them on a GPU."""

    def __init__(self, products: bool) -> None:
        super().__init__()
        self._others: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: _lean_attention}
        if products:
            self._others[F.conv3d] = _as_products
            self._others[F.conv2d] = _as_flat_products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._others.get(func, func)(*args, **(kwargs or {}))


def _lean_attention(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(q)


def _as_products(*args: Any) -> Tensor:
    return exact.conv3d(*args[:5], taps=1)


def _as_flat_products(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...],
                      padding: tuple[int, ...], *others: Any) -> Tensor:  # fmt: skip
    if others:  # a call of torch's own module, which computes no products
        return F.conv2d(x, weight, bias, stride, padding, *others)
    y = exact.conv3d(x.unsqueeze(2), weight.unsqueeze(2), bias, (1, *stride), (0, *padding), taps=1)
    return y.squeeze(2)


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


class PeakMemory(TorchDispatchMode):
    """Measure the peak memory of tensors made inside: `with PeakMemory() as m: program()`, then `m.peak` in bytes.

    Convolutions also hold a re-laid-out input, weight and output while they run.

    Attributes:
        live: largest number of bytes in use, whatever is reserved for them.
    """

    def __init__(self, products: bool = False, reserves: bool = False) -> None:
        """Choose the way to count.

        Args:
            products: convolutions are matrix products (engine/kernels/exact.py).
            reserves: `peak` is the memory that torch's caching allocator reserves; False: in use.
        """
        super().__init__()
        self.live = 0
        self._functions = _Functions(products)
        self._allocator = Allocator() if reserves else None
        self._now = 0
        self._holders: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        #: Live storages -> their numbers, in the order in which they were made.
        self._numbers: dict[int, int] = {}
        self._made = 0
        self._events: list[Event] | None = None
        self._first = 0
        self._held: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or torch imports its compiler to make it skip this mode: 1.2 s of CPU, 10 us an operation."""
        return False

    def __enter__(self) -> PeakMemory:
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

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
            if self._allocator is not None:
                self._allocator.touch(extra)
        self.need(extra)
        return out

    @property
    def peak(self) -> int:
        """Return the peak in bytes: reserved where an allocator is modelled, else in use."""
        return max(self.live, 0 if self._allocator is None else self._allocator.reserved)

    def above(self, work: Callable[[], T]) -> tuple[T, int]:
        """Return the result of work(), and the largest number of bytes that it adds to those already in use."""
        before, start = self.live, self._now
        self.live = start
        result = work()
        more, self.live = self.live - start, max(before, self.live)
        return result, more

    def need(self, more: int) -> None:
        """Count work that adds at most `more` bytes to those in use, without doing it."""
        self.live = max(self.live, self._now + more)

    def number(self, tensor: Tensor) -> int:
        """Return the number of the tensor's storage, -1 where it was not made inside."""
        return self._numbers.get(tensor.untyped_storage()._cdata, -1)

    @contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Record the allocations and releases inside."""
        self._events, self._first = [], self._made
        try:
            yield self._events
        finally:
            self._events = None

    def _note(self, number: int | None, size: int, takes: bool = True) -> None:
        if self._events is not None:
            self._events.append(Event(number, size, takes, number is None or number >= self._first))

    def follow(self, events: Iterable[tuple[Event, Any]], drop: Callable[[Any], object]) -> dict[int, Block | None]:
        """Replay recorded events without tensors; drop(what) releases a storage that is older than the record, in place
        of an event that comes with a `what`.

        Returns:
            The blocks taken and not given back, by the numbers of their storages in the record.
        """
        taken: dict[int, Block | None] = {}
        allocator, now, peak = self._allocator, self._now, self.live
        for (number, size, takes, _), what in events:
            if what is not None:
                self._now = now
                drop(what)
                now = self._now
            elif not takes:
                now -= size
                given = taken.pop(number)
                if given is not None:
                    allocator.give(given)
            else:
                if now + size > peak:
                    peak = now + size
                if number is not None:
                    now += size
                    taken[number] = allocator.take(size) if allocator is not None and size else None
                elif allocator is not None:
                    allocator.touch(size)
        self._now, self.live = now, peak
        return taken

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._holders:
            self._note(self._made, size)
            self._now += size
            self._lies(key, self._allocator.take(size) if self._allocator is not None and size else None)
        self._held_by(tensor, key, size)

    def lay(self, made: Tensor, given: Block | None) -> Tensor:
        """Return `made` with its storage placed in a block that `follow` has taken and counted already."""
        storage = made.untyped_storage()
        self._lies(storage._cdata, given)
        self._held_by(made, storage._cdata, storage.nbytes())
        return made

    def _lies(self, key: int, given: Block | None) -> None:
        self._holders[key] = 0
        self._numbers[key] = self._made
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
            self._note(self._numbers.pop(key), size, takes=False)
            self._now -= size
            if key in self._blocks:
                self._allocator.give(self._blocks.pop(key))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def peak_bytes(program: Callable[[], Any], memory: PeakMemory | None = None) -> int:
    """Return the peak bytes of the tensors that `program` makes on the meta device, as `memory` counts them."""
    # Under a caller's inference mode, as ComfyUI's, composite operators would arrive whole, without their temporaries.
    with torch.inference_mode(False), torch.no_grad(), memory or PeakMemory() as memory:
        program()
    return memory.peak
