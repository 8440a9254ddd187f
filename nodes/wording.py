"""Errors of the engine in the words of the nodes: a sentence first, then the figures, and widgets by their labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..engine import PlanError

#: Options of the engine -> labels on the nodes.
_LABELS = {
    "vram_gb": "VRAM limit (vram_gb)",
    "ram_gb": "RAM limit (ram_gb)",
    "tile": "Tile size (tile)",
    "overlap": "Tile overlap (overlap)",
}
_OPTION = re.compile(rf"\b({'|'.join(_LABELS)})\b(?!=)")


def labelled(text: str) -> str:
    """Return `text` with the labels of the widgets in place of the engine's option names ("tile=0" stays: it is a
    value)."""
    return counted(_OPTION.sub(lambda found: _LABELS[found.group()], text))


def counted(text: str) -> str:
    """Return `text` with right plurals: "2 latent(s)" becomes "2 latents", "1 frames" becomes "1 frame"."""
    text = re.sub(r"\b1 ([a-z]+)\(s\)", r"1 \1", text)
    text = re.sub(r"\b(\d+) ([a-z]+)\(s\)", r"\1 \2s", text)
    return re.sub(r"(?<![\d.x])\b1 (frame|latent|chunk|clip)s\b", r"1 \1", text)


@contextmanager
def fitting(operation: str) -> Iterator[None]:
    """Wrap the planning of a run: an error of a plan that does not fit begins with a sentence that says so."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"This {operation} does not fit into its memory limit. {labelled(str(error))}") from error
