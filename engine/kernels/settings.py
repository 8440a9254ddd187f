"""torch's process-wide settings under overlapping runs: the first run saves the value it finds, the last one restores
it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()


class Setting:
    """One such setting. Overlapping runs may want different values: while any of them wants `exact`, that value holds,
    since the others lose only speed. A value that other code sets meanwhile stays."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object], exact: Any) -> None:
        self._get = get
        self._put = put
        self.exact = exact
        self._wanted: Counter[Any] = Counter()
        self._found: Any = None
        self._ours: Any = None

    @classmethod
    def attribute(cls, holder: object, name: str, exact: Any) -> Setting:
        """Return the setting stored in `holder.name`."""
        return cls(lambda: getattr(holder, name), lambda value: setattr(holder, name, value), exact)

    @contextmanager
    def hold(self, value: Any) -> Iterator[None]:
        """Hold the setting at `value`, or `exact`, inside."""
        with _lock:
            if not self._wanted:
                self._found = self._ours = self._get()
            self._wanted[value] += 1
            self._settle()
        try:
            yield
        finally:
            with _lock:
                self._wanted -= Counter([value])
                if self._wanted:
                    self._settle()
                elif self._get() == self._ours:
                    self._set(self._found)

    def is_one_of(self, *values: Any) -> bool:
        """Check that the setting has one of these values and no run holds it, so that none will put another one
        back."""
        with _lock:
            return not self._wanted and self._get() in values

    def _settle(self) -> None:
        self._set(self.exact if self.exact in self._wanted else next(iter(self._wanted)))

    def _set(self, value: Any) -> None:
        if self._get() != value:
            self._put(value)
        self._ours = value
