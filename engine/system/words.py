"""Words that several rooms use in what they say to people."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

#: What runs a network in 8 bit on a CPU, where nothing is fused.
REFERENCE = "reference operators"


def many(count: int, word: str) -> str:
    """Return a number with its word: "1 frame", "2 frames"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def html_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return (name, text) pairs as a table of HTML; those without a text are left out."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows if text)
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"
