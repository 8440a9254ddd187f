"""Known architectures, found by the keys in a file."""

from __future__ import annotations

from collections.abc import Iterable

from ..checkpoint.names import find_key_set
from . import seedvr2
from .arch import Architecture

ARCHITECTURES: tuple[Architecture, ...] = (seedvr2.ARCHITECTURE,)


def detect(keys: Iterable[str]) -> Architecture | None:
    """The architecture whose key set (checkpoint/names.py) is among `keys`, or None."""
    found = find_key_set(keys)
    return next((a for a in ARCHITECTURES if found is not None and a.name == found.name), None)
