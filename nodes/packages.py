"""Packages that a ComfyUI may lack although this pack asks for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..engine import InputError


@contextmanager
def needing_gguf(what: str) -> Iterator[None]:
    """Wrap work on GGUF files: a missing gguf package becomes one line that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise InputError(
            f"{what}: the Python package gguf is missing. Install it with: "
            f'"{sys.executable}" -m pip install "gguf>=0.13.0"'
        ) from error
