"""Words that several rooms use in what they say to people."""

from __future__ import annotations

#: What runs a network in 8 bit on a CPU, where nothing is fused.
REFERENCE = "reference operators"


def many(count: int, word: str) -> str:
    """Return a number with its word: "1 frame", "2 frames"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
