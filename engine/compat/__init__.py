"""The functions of the original documents; their files are imported when the first name is used."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    for part in () if name.startswith("__") else ("names", "modules"):
        module = import_module(f"..extras.compat.{part}", __name__)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
