"""The names of the original documents. Those of names.py are looked up when first used: a VAE needs only methods.py."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.names"), name)
