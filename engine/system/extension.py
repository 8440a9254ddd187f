"""The points of the core that extras fill. The core names the points and runs without what fills them;
`engine/extras/__init__.py` names the modules, and each is imported when its point is first used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..errors import InputError

#: Point -> full name of the module that fills it.
_FILLED: dict[str, str] = {}


def fill(modules: Mapping[str, str]) -> None:
    """Let modules fill points from now on. modules: point -> full name of a module, whose functions and classes are
    those of the point's Protocol."""
    _FILLED.update(modules)


def provider(point: str) -> Any:
    """Return the module that fills a point, typed by that point's Protocol where it is used; None: nothing fills it."""
    name = _FILLED.get(point)
    return None if name is None else import_module(name)


def needed(point: str) -> Any:
    """Return what `provider` does; raise InputError where nothing fills the point."""
    found = provider(point)
    if found is None:
        raise InputError(f"nothing fills the point {point} of the core: engine/extras is not complete")
    return found
