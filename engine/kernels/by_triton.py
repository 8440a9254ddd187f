"""Launch kernels that Triton compiled: the first launch of each by Triton, later ones through the driver.

Triton finds out anew at every launch which of its kernels the arguments ask for, which takes the host some 50 to 110
us; `prebuilt.launch.Bound` takes 20 to 40 for the same kernel. Decodes with many small kernels wait for the host.
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .descriptor import Descriptor
from .prebuilt.driver import driver
from .prebuilt.errors import PrebuiltError
from .prebuilt.keys import key, takes
from .prebuilt.launch import Bound, leading, place_of
from .prebuilt.library import Entry, Map


class ByTriton:
    """One kernel as operators launch it: `kernel[grid](*arguments, **constants)`. Thread-safe."""

    def __init__(self, kernel: str, function: Any) -> None:
        """kernel: its name, as `launching.launcher` takes it. function: Triton's."""
        self._kernel, self._function = kernel, function
        in_gluon = getattr(function, "is_gluon", lambda: False)()  # Triton's interpreter does not know
        self._described = _described_in_gluon if in_gluon else _described()
        self._interpreted = not hasattr(function, "device_caches")  # by Triton, on a CPU
        self._pointers: int | None = None
        #: None: Triton launches it, too.
        self._bound: dict[tuple[Any, ...], Bound | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        count = self._pointers
        if count is None:
            count = self._pointers = leading(arguments)
        addresses = [a.data_ptr() for a in arguments[:count]]
        joined = functools.reduce(operator.or_, addresses, 0)
        # Triton has another kernel for an address that is no multiple of 16. Meta tensors have none: their kernels are
        # compiled and not launched, also where no GPU is.
        if self._interpreted or not joined or joined & 15:
            self._by_triton(grid, arguments, constants)
            return
        place = place_of(arguments[:count], constants)
        bound = self._bound.get(place)
        if bound is not None:
            try:
                bound(grid, addresses, arguments)
                return
            except struct.error:  # a number beyond 32 bits: another kernel
                self._by_triton(grid, arguments, constants)
                return
        compiled = self._by_triton(grid, arguments, constants)
        if place not in self._bound:
            self._bound[place] = self._binding(place[0], compiled, arguments, constants)

    def _by_triton(self, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]) -> Any:
        return self._function[grid](*map(self._converted, arguments), **constants)

    def _converted(self, argument: Any) -> Any:
        if type(argument) is not Descriptor:
            return argument
        return self._described(argument.base, argument.shape, argument.strides, [*argument.block_shape])

    def _binding(
        self, device: int, compiled: Any, arguments: Sequence[Any], constants: Mapping[str, Any]
    ) -> Bound | None:
        """Return how to launch what Triton just launched; None where Triton alone knows."""
        function, wanted = getattr(compiled, "function", None), key(self._kernel, arguments, constants)
        if type(function) is not int or self._specialised(arguments):
            return None
        try:
            entry = entry_of(compiled, takes(wanted))
            return None if entry is None else Bound(driver(), device, function, entry, arguments, wanted)
        except PrebuiltError:  # no such driver on this platform
            return None

    def _specialised(self, arguments: Sequence[Any]) -> bool:
        """Return whether Triton compiles other kernels for other numbers among the arguments."""
        numbers = [p for p, a in zip(self._function.params, arguments, strict=False) if type(a) is int]
        return not all(p.do_not_specialize for p in numbers)


def entry_of(compiled: Any, parameters: tuple[str, ...]) -> Entry | None:
    """Return how a kernel that Triton compiled is launched; None where it needs more than an `Entry` says, or where
    this version of Triton passes arguments in another way.

    Args:
        compiled: as Triton returns it from a launch.
        parameters: what the compiled entry should take, as `keys.takes` says.

    Raises:
        PrebuiltError: only the driver could tell what it takes, and there is none.
    """
    meta, text = compiled.metadata, compiled.asm.get("ptx")
    more = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if any(getattr(meta, name, 0) for name in more) or getattr(meta, "num_ctas", 1) != 1:
        return None
    if text is None:  # Triton's cache has no texts under TRITON_STORE_BINARY_ONLY, or where they were taken out of it
        count = driver().parameters(compiled.function)
    else:
        found = re.search(r"\.visible \.entry \w+\((.*?)\)", text, re.S)
        count = found[1].count(".param ") if found else 0
    maps = [*map(_map, getattr(meta, "tensordesc_meta", None) or ())]
    if None in maps or parameters.count("map") != len(maps) or count != len(parameters):
        return None
    return Entry(meta.name, meta.shared, meta.num_warps, parameters, tuple(m for m in maps if m))


def _map(described: Mapping[str, Any]) -> Map | None:
    try:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as ELEMENTS
    except ImportError:
        return None
    if described.get("fp4_padded"):
        return None
    element = ELEMENTS[described["elem_type"]]
    return Map(described["swizzle"], element, described["elem_size"], tuple(described["block_size"]))


def _described() -> Callable[..., Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


def _described_in_gluon(base: Any, shape: Any, strides: Any, block: list[int]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(base, [*shape], [*strides], block, swizzled(block, base.element_size()))


def swizzled(block: Sequence[int], itemsize: int) -> Any:
    """Return the layout in shared memory of a tile that a kernel in Gluon reads with bulk copies. Imports Triton."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(min(block[-1] * itemsize, 128), 8 * itemsize, len(block))
