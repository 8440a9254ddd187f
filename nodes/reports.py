"""Reports of nodes: a text for reading, and the same facts for the panel and for headless clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .wording import counted

if TYPE_CHECKING:
    from ..engine.report import Report

#: Key of the report in a node's ui output; web/js reads it.
KEY = "zerowaste"


@dataclass
class Outcome:
    """The outcome of a decode or encode: the engine's report, the host's share of the time, and lines of the node's
    own."""

    report: Report
    load_seconds: float | None  # None: the host loads the weights inside its own code
    plan: dict[str, object] | None = None
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [self.report.text()]
        if self.load_seconds is not None:
            lines.append(f"{'load':<8}{self.load_seconds:.2f} s for ComfyUI to free memory and load the weights")
        return counted("\n".join([*lines, *(f"{'note':<8}{note}" for note in self.notes)]))

    def ui(self) -> dict[str, tuple]:
        """Return the ui output of a node: `text`, and under KEY the engine's report, the plan and the notes."""
        facts = self.report.as_dict() | {"load_seconds": self.load_seconds, "plan_facts": self.plan}
        return ui(self.text(), facts | {"notes": [counted(note) for note in self.notes]})


def ui(text: str, facts: dict[str, object] | None = None) -> dict[str, tuple]:
    """Return the ui output of a node with this text, and facts if any."""
    return {"text": (text,), KEY: ((facts or {}) | {"text": text},)}
