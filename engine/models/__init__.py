"""Known architectures, found by the keys in a file."""

from __future__ import annotations

from collections.abc import Iterable

from . import seedvr2
from .arch import Architecture

ARCHITECTURES: tuple[Architecture, ...] = (seedvr2.ARCHITECTURE,)


def detect(keys: Iterable[str]) -> Architecture | None:
    """The architecture one of whose detection keys is among `keys`, or None."""
    present = set(keys)
    return next((a for a in ARCHITECTURES if present.intersection(a.detect_keys)), None)
