"""The pack's logger: every line carries the documented prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable

PREFIX = "[BLACKWELL_ENGINE]"

logger = logging.getLogger("zerowaste_vae")
_said: set[str] = set()


def info(message: str) -> None:
    logger.info("%s %s", PREFIX, message)


def warn(message: str) -> None:
    logger.warning("%s %s", PREFIX, message)


def once(message: str, say: Callable[[str], None] = warn) -> None:
    """Say (by default warn) something that stays as it is, such as a path that is off, the first time only."""
    if message not in _said:
        _said.add(message)
        say(message)


def debug(message: str) -> None:
    logger.debug("%s %s", PREFIX, message)
