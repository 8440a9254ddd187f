"""The hook by which a profiler observes the operators. Without a profiler a call costs one more comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

#: watch(operator, args, kwargs, call) runs call() and returns its result.
Watch = Callable[[str, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
F = TypeVar("F", bound=Callable[..., Any])

_watch: Watch | None = None


def observed(function: F) -> F:
    """Make an operator's calls visible to `watching`. Operators called inside count as part of it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _watch is None else watched(function, args, kwargs)

    return call  # type: ignore[return-value]


def watched(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call that the listener makes, if it is not busy with one of another thread."""
    global _watch
    watch, _watch = _watch, None
    if watch is None:
        return function(*args, **kwargs)
    try:
        return watch(function.__name__, args, kwargs, functools.partial(function, *args, **kwargs))
    finally:
        _watch = watch


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Pass every operator called inside through `watch`. One listener per process."""
    global _watch
    kept, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = kept


def listening() -> bool:
    """Return True while operators are observed."""
    return _watch is not None
