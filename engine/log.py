"""The pack's logger: every line carries the documented prefix."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PREFIX = "[BLACKWELL_ENGINE]"

logger = logging.getLogger("zerowaste_vae")
_said: set[str] = set()
_here = threading.local()


@contextmanager
def silent() -> Iterator[None]:
    """Say nothing in this thread: what is only looked at, and not run, is no news."""
    _here.silent = True
    try:
        yield
    finally:
        _here.silent = False


def info(message: str) -> None:
    _say(logging.INFO, message)


def warn(message: str) -> None:
    _say(logging.WARNING, message)


def _say(level: int, message: str) -> None:
    if not getattr(_here, "silent", False):
        logger.log(level, "%s %s", PREFIX, message)


def once(message: str, say: Callable[[str], None] = warn) -> None:
    """Say (by default warn) something that stays as it is, such as a path that is off, the first time only."""
    if message not in _said and not getattr(_here, "silent", False):
        _said.add(message)
        say(message)


def debug(message: str) -> None:
    _say(logging.DEBUG, message)
