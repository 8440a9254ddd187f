"""Where a profiler listens to the operators. While nobody listens, a call costs one comparison more."""

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
    """Make an operator's calls visible to `watching`. What an operator calls inside counts as its own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _watch
        if _watch is None:
            return function(*args, **kwargs)
        watch, _watch = _watch, None
        try:
            return watch(function.__name__, args, kwargs, functools.partial(function, *args, **kwargs))
        finally:
            _watch = watch

    return call  # type: ignore[return-value]


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Every operator called inside goes through `watch`. One listener per process."""
    global _watch
    kept, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = kept


def listening() -> bool:
    """Whether operators are being watched."""
    return _watch is not None
