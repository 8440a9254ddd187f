"""Launch prebuilt kernels: find each by its key once, then pack arguments and hand them to the driver.

A launch is on the host's critical path (about a thousand for a small decode), so everything that does not change
between two launches of one kernel is made once: the handle, the layout of its parameters, and for kernels that read
with bulk copies their tensor maps.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..descriptor import Descriptor
from .driver import MAP_ALIGNMENT, MAP_BYTES, Driver, driver
from .errors import PrebuiltError
from .keys import Key, aligned, key, type_of
from .library import Compiled, Entry, Map, Text, library

#: struct's letter of each kind of number among a kernel's parameters.
_LETTERS = {"i32": "i", "i64": "q", "fp32": "f"}
#: Sets of tensor maps that one kernel keeps: one for each layer and buffer. More than these are made anew.
_MOST_MAPS = 256
_lock = threading.RLock()
#: (device, set, the key's digest) -> the driver's handle. Forms share kernels of a set.
_loaded: dict[tuple[int, str, str], int] = {}
#: (device, form, use) of which all kernels are loaded.
_complete: set[tuple[int, str, str]] = set()
#: A kernel that takes longer to load was not in the driver's cache: compiling the shortest takes 30 ms, reading it 0.4.
_CACHED_SECONDS = 0.005


class Prebuilt:
    """One kernel as operators launch it: `kernel[grid](*arguments, **constants)`. Thread-safe."""

    def __init__(self, kernel: str, form: str) -> None:
        """kernel: its name, as `launching.launcher` takes it. form: the set it is from, "A" to "D"."""
        self._kernel, self._form = kernel, form
        self._pointers: int | None = None
        self._bound: dict[tuple[Any, ...], Bound] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Raises PrebuiltError where the set lacks the kernel or the driver does not take it, SetError where the set's
        files are damaged."""
        count = self._pointers
        if count is None:
            count = self._pointers = leading(arguments)
        addresses, place = [a.data_ptr() for a in arguments[:count]], place_of(arguments[:count], constants)
        bound = self._bound.get(place) or self._bind(place, arguments, constants)
        try:
            bound(grid, addresses, arguments)
        except struct.error:  # a number beyond 32 bits: another kernel
            place = (*place, *(type_of(a) for a in arguments[count:]))
            bound = self._bound.get(place) or self._bind(place, arguments, constants)
            bound(grid, addresses, arguments)

    def _bind(self, place: tuple[Any, ...], arguments: Sequence[Any], constants: Mapping[str, Any]) -> Bound:
        device, wanted = place[0], key(self._kernel, arguments, constants)
        with _lock:
            if not library().has(self._form, wanted):
                raise PrebuiltError(f"set {self._form} lacks a kernel that this run needs ({wanted})")
            known = device, library().origin(self._form, wanted), wanted.digest
            function = _loaded.get(known)
            if function is None:  # loaded ones need no text, which would have to be unpacked again
                function = _load(known, library().kernel(self._form, wanted))
            entry = library().entry(self._form, wanted)
            bound = self._bound[place] = Bound(driver(), device, function, entry, arguments, wanted)
        return bound


def read_ahead(device: int, form: str, uses: Iterable[str]) -> None:
    """Have the texts of uses unpacked in a thread, of which not all kernels are loaded. Arguments as of `preload`."""
    library().read_ahead(form, [use for use in uses if (device, form, use) not in _complete])


def preload(device: int, form: str, use: str, threads: int) -> None:
    """Load the kernels of a use that a set was made for before its first run, which then waits for none.

    Args:
        device: as torch counts.
        form: "A" to "D".
        use: as `planning.launches.use_id` names it. Kernels of other uses are loaded one by one when they are launched.
        threads: how many compile at the same time where the driver's cache does not have the kernels.

    Raises:
        PrebuiltError, SetError: as launches raise them.
    """
    if (device, form, use) in _complete:
        return
    try:
        _preload(device, form, library().texts(form, use), threads)
    finally:
        library().forget(form, use)
    _complete.add((device, form, use))


def _preload(device: int, form: str, texts: list[Text], threads: int) -> None:
    left = [text for text in texts if (device, text.origin, text.digest) not in _loaded]
    left.sort(key=lambda text: len(text.ptx), reverse=True)
    together = False
    while left:
        text, began = left.pop(), time.perf_counter()
        with _lock:
            _load((device, text.origin, text.digest), text)
        if not together and time.perf_counter() - began > _CACHED_SECONDS:
            together = True
            found = driver().load_all(device, [(other.ptx, other.symbol, other.shared) for other in left], threads)
            with _lock:
                for other, function in zip(left, found, strict=True):
                    if function:
                        _loaded.setdefault((device, other.origin, other.digest), function)
            left = [other for other, function in zip(left, found, strict=True) if not function]


def _load(known: tuple[int, str, str], text: Compiled | Text) -> int:
    if known not in _loaded:
        _loaded[known] = driver().load(known[0], text.ptx, text.symbol, text.shared)
    return _loaded[known]


def written(device: int, symbol: str, form: str, shared: int, text: Callable[[], str]) -> int:
    """Return the driver's handle of a kernel that is in no set: its text is written when it is first launched.

    Args:
        device: as torch counts.
        symbol: the entry's name.
        form: what tells texts of one name apart.
        shared: bytes of shared memory of a block.
        text: writes the PTX.

    Raises: PrebuiltError where the driver does not take it.
    """
    known = device, symbol, form
    with _lock:
        if known not in _loaded:
            _loaded[known] = driver().load(device, text().encode(), symbol, shared)
        return _loaded[known]


class Bound:
    """A loaded kernel on a device, with the layout of its parameters.

    The packed block has the addresses of all tensors, a null, and then the numbers; what a descriptor stands for, its
    map, sizes and strides, lies in memory of its own that launches share.
    """

    def __init__(
        self, driver: Driver, device: int, function: int, entry: Entry, arguments: Sequence[Any], wanted: Key
    ) -> None:
        """arguments: of one launch, as an example. wanted: the kernel's key."""
        self._driver, self._device, self._function = driver, device, function
        self._shared, self._threads = entry.shared, 32 * entry.warps
        self._maps, self._count = entry.maps, leading(arguments)
        self._described = [i for i, a in enumerate(arguments) if isinstance(a, Descriptor)]
        self._aligned = aligned(wanted)
        kinds = wanted.types[self._count :]
        head, letters = f"@{self._count + 1}Q", "".join(_LETTERS[kind] for kind in kinds)
        self._packed = struct.Struct(head + letters)
        ends = (struct.calcsize(head + letters[: i + 1]) for i in range(len(letters)))
        self._numbers = [end - struct.calcsize(letter) for end, letter in zip(ends, letters, strict=True)]
        expected = sum(1 + 2 * len(a.shape) if isinstance(a, Descriptor) else 1 for a in arguments) + 2
        if len(entry.parameters) != expected or len(entry.maps) != len(self._described):
            raise PrebuiltError(f"{entry.symbol} takes {len(entry.parameters)} parameters, not {expected}: the set is "
                                "of another version")  # fmt: skip
        #: What tensor maps are made of -> frames ready to be packed, each used by one launch at a time.
        self._frames: dict[tuple[Any, ...], list[Frame]] = {}
        #: The same for each map: those of weights come again where those of frames do not.
        self._known: dict[tuple[Any, ...], tuple[Any, int]] = {}

    def __call__(self, grid: tuple[int, ...], addresses: list[int], arguments: Sequence[Any]) -> None:
        if functools.reduce(operator.or_, map(addresses.__getitem__, self._aligned), 0) & 15:
            raise PrebuiltError("a tensor's address is no multiple of 16, which this kernel counts on")
        described = tuple([(addresses[i], arguments[i].shape, arguments[i].strides) for i in self._described])
        free = self._frames.get(described)
        if free is None:
            if len(self._frames) >= _MOST_MAPS:
                self._frames.clear()
                self._known.clear()
            free = self._frames.setdefault(described, [])
        try:
            frame = free.pop()
        except IndexError:
            frame = self._frame(addresses, arguments)
        self._packed.pack_into(frame.block, 0, *addresses, 0, *arguments[self._count :])
        self._driver.launch(self._device, self._function, grid, self._threads, self._shared,
                            torch._C._cuda_getCurrentRawStream(self._device), frame.parameters)  # fmt: skip
        free.append(frame)

    def _frame(self, addresses: list[int], arguments: Sequence[Any]) -> Frame:
        block = ctypes.create_string_buffer(self._packed.size)
        start, maps = ctypes.addressof(block), iter(self._maps)
        kept: list[Any] = []
        where: list[int] = []
        for i, argument in enumerate(arguments[: self._count]):
            if isinstance(argument, Descriptor):
                made_of = i, addresses[i], argument.shape, argument.strides
                form, known = next(maps), self._known.get(made_of)  # another thread may clear them
                if known is None:
                    known = self._known[made_of] = self._map(form, addresses[i], argument)
                held, at = known
                rank = len(argument.shape)
                sizes, strides = (ctypes.c_int32 * rank)(*argument.shape), (ctypes.c_int64 * rank)(*argument.strides)
                kept += [held, sizes, strides]
                where += [at, *(ctypes.addressof(sizes) + 4 * d for d in range(rank)),
                          *(ctypes.addressof(strides) + 8 * d for d in range(rank))]  # fmt: skip
            else:
                where.append(start + 8 * i)
        null = start + 8 * self._count
        where += [*(start + place for place in self._numbers), null, null]
        return Frame(block, (ctypes.c_void_p * len(where))(*where), kept)

    def _map(self, form: Map, address: int, described: Descriptor) -> tuple[Any, int]:
        """Return the buffer that holds a tensor map, and the map's address."""
        buffer = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        at = ctypes.addressof(buffer)
        at += -at % MAP_ALIGNMENT
        with self._driver.in_context(self._device):
            self._driver.tensor_map(at, address, form.element_type, form.element_bytes, described.shape,
                                    described.strides, form.box, form.swizzle)  # fmt: skip
        return buffer, at


class Frame:
    """A launch's packed numbers and addresses, and the array of where each parameter lies."""

    __slots__ = ("_kept", "block", "parameters")

    def __init__(self, block: Any, parameters: Any, kept: list[Any]) -> None:
        """kept: memory that `parameters` points into besides `block`."""
        self.block, self.parameters, self._kept = block, parameters, kept


def place_of(tensors: Sequence[Any], constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a kernel's launches on the current device apart: the device, the tensors' types, the constants.

    Its numbers are of the same kinds in all launches, and blocks of descriptors follow from constants."""
    return torch._C._cuda_getDevice(), *[a.dtype for a in tensors], *constants, *constants.values()


def leading(arguments: Sequence[Any]) -> int:
    """Return how many of the arguments are tensors or their descriptors; raises TypeError if others are among them."""
    count = sum(hasattr(a, "data_ptr") for a in arguments)
    if not all(hasattr(a, "data_ptr") for a in arguments[:count]):
        raise TypeError("tensors come before numbers in a kernel's arguments")
    return count
