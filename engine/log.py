"""The pack's logger, which puts the documented prefix before every line."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import LINE, one_line

PREFIX = "[BLACKWELL_ENGINE]"

logger = logging.getLogger("zerowaste_vae")
_said: set[str] = set()
_here = threading.local()


@contextmanager
def silent() -> Iterator[None]:
    """Log nothing in this thread: plans that are only looked at, and not run, are no news."""
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
        logger.log(level, "%s %s", PREFIX, one_line(message, LINE))


def once(message: str, say: Callable[[str], None] = warn) -> None:
    """Log (by default as a warning) a lasting fact, such as a path that is off, the first time only."""
    if message not in _said and not getattr(_here, "silent", False):
        _said.add(message)
        say(message)


def debug(message: str) -> None:
    _say(logging.DEBUG, message)
