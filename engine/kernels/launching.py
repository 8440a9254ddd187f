"""Launch a kernel by its name, prebuilt or compiled by Triton: operators do not see the difference.

Nothing here imports Triton before a kernel is launched through it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from .targets import Target, using

#: Kernel -> the module that has its source. Operators add theirs when they are imported.
SOURCES: dict[str, str] = {}


class Call(NamedTuple):
    """One launch: the kernel's name, its grid, its arguments by position, and its constants with warps and stages."""

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]


class Kernel(Protocol):
    """The result of `launcher`: `kernel[grid](*arguments, **constants)` queues one launch on the current stream."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


_recording: ContextVar[list[Call] | None] = ContextVar("recording", default=None)
_launchers: dict[tuple[str, str], Kernel] = {}


def launcher(kernel: str, here: Target) -> Kernel:
    """Return the launcher of a kernel under `here`: from its prebuilt set, or by Triton.

    Args:
        kernel: its name in `SOURCES`, such as "conv3d.conv_kernel".
        here: the device as `targets.target` returns it. Launches go to the current device.

    Raises:
        The error of importing Triton, where that is chosen and does not work.
    """
    if (calls := _recording.get()) is not None:
        return _Recorder(kernel, calls)
    known = kernel, here.way
    found = _launchers.get(known)
    if found is None:
        found = _launchers[known] = _compiled(kernel) if here.set is None else _prebuilt(kernel, here.set)
    return found


@contextmanager
def recording(here: Target | None = None) -> Iterator[list[Call]]:
    """Collect the launches inside, in order, instead of running them. here: the target of meta tensors, which have no
    device."""
    calls: list[Call] = []
    token = _recording.set(calls)
    try:
        with using(here):
            yield calls
    finally:
        _recording.reset(token)


def register(module: str, *kernels: str) -> None:
    """Note where the kernels of an operator have their source.

    Args:
        module: of the operator, whose folder is the first part of a kernel's name.
        kernels: functions of kernels.py beside it, or "gluon.NAME" of another file.
    """
    package = module.rpartition(".")[0]
    for kernel in kernels:
        file, _, name = kernel.rpartition(".")
        SOURCES[f"{package.rpartition('.')[2]}.{name}"] = f"{package}.{file or 'kernels'}"


@functools.cache
def function(kernel: str) -> Any:
    """Return Triton's function of a kernel's name. Imports Triton.

    Raises:
        ModuleNotFoundError: it is a family's, and that is not imported.
    """
    folder, _, name = kernel.rpartition(".")
    if kernel not in SOURCES:
        importlib.import_module(f".{folder}", __package__)
    return getattr(importlib.import_module(SOURCES[kernel]), name)


def source_of(function: Any, signature: Any, constants: Any, attributes: Any) -> Any:
    """Return what Triton compiles of a function ahead of any launch: in Triton's language or in its lower-level one."""
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    return Source(function, signature, constants, attributes)


def _compiled(kernel: str) -> Kernel:
    from .by_triton import ByTriton

    return ByTriton(kernel, function(kernel))


def _prebuilt(kernel: str, form: str) -> Kernel:
    from .prebuilt.launch import Prebuilt

    return Prebuilt(kernel, form)


class _Recorder:
    def __init__(self, kernel: str, calls: list[Call]) -> None:
        self._kernel, self._calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *arguments, **constants: self._calls.append(Call(self._kernel, grid, arguments, constants))
