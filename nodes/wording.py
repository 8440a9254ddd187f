"""Errors of the engine in the words of the nodes: a sentence first, then the figures, and widgets by their labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..engine import PlanError

#: Options of the engine -> what a user sees on the nodes.
_LABELS = {"vram_gb": "VRAM limit", "ram_gb": "RAM limit", "tile": "Tile size", "overlap": "Tile overlap"}
_OPTION = re.compile(rf"\b({'|'.join(_LABELS)})\b(?!=)")


def labelled(text: str) -> str:
    """`text` with the labels of the widgets in place of the engine's option names ("tile=0" stays: it is a value)."""
    return _OPTION.sub(lambda found: f"{_LABELS[found.group()]} ({found.group()})", text)


@contextmanager
def fitting(operation: str) -> Iterator[None]:
    """Around the planning of a run: what does not fit leads with a sentence that says so."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"This {operation} does not fit into its memory limit. {labelled(str(error))}") from error
