"""Reports and errors of nodes, in the words of their widgets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..engine import InputError, PlanError
from ..engine.errors import LINE, one_line

if TYPE_CHECKING:
    from ..engine.report import Report

#: Key of the report in a node's ui output; web/js reads it.
KEY = "zerowaste"


@dataclass
class Outcome:
    """The outcome of a decode or encode: the engine's report, the host's share of the time, and the node's notes."""

    report: Report
    load_seconds: float | None  # None: the host loads the weights inside its own code
    plan: dict[str, object] | None = None
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [self.report.text()]
        if self.load_seconds is not None:
            lines.append(f"{'load':<8}{self.load_seconds:.2f} s for ComfyUI to free memory and load the weights")
        return counted("\n".join([*lines, *(f"{'note':<8}{one_line(note, LINE)}" for note in self.notes)]))

    def ui(self) -> dict[str, tuple]:
        """Return the ui output of a node: `text`, and under KEY the engine's report, the plan and the notes."""
        facts = self.report.as_dict() | {"load_seconds": self.load_seconds, "plan_facts": self.plan}
        return ui(self.text(), facts | {"notes": [counted(one_line(note, LINE)) for note in self.notes]})


def ui(text: str, facts: dict[str, object] | None = None) -> dict[str, tuple]:
    """Return the ui output of a node with this text, and facts if any."""
    return {"text": (text,), KEY: ((facts or {}) | {"text": text},)}


#: Options of the engine -> labels on the nodes.
_LABELS = {"vram_gb": "VRAM limit (vram_gb)", "ram_gb": "RAM limit (ram_gb)", "tile": "Tile size (tile)",
           "overlap": "Tile overlap (overlap)"}  # fmt: skip
#: The engine's name of the widget GPUs, as its refusals begin.
_DEVICES, _GPUS = re.compile(r"^devices\b"), "GPUs (gpus)"
_OPTION = re.compile(rf"\b({'|'.join(_LABELS)})\b(?!=)")


def labelled(text: str) -> str:
    """Return `text` with the widgets' labels in place of the engine's option names, except in values ("tile=0")."""
    return counted(_OPTION.sub(lambda found: _LABELS[found.group()], _DEVICES.sub(_GPUS, text)))


@contextmanager
def naming_gpus() -> Iterator[None]:
    """Have a refusal of devices begin with the label of the widget that names them."""
    try:
        yield
    except InputError as error:
        error.args = (_DEVICES.sub(_GPUS, str(error)),)
        raise


def counted(text: str) -> str:
    """Return `text` with right plurals: "1 frames" becomes "1 frame"."""
    return re.sub(r"(?<![\d.x])\b1 (frame|latent|chunk|clip)s\b", r"1 \1", text)


@contextmanager
def fitting(operation: str) -> Iterator[None]:
    """Wrap the planning of a run: an error of a plan that does not fit begins with a sentence that says so, one of
    devices with the widget that names them."""
    try:
        with naming_gpus():
            yield
    except PlanError as error:
        raise PlanError(f"This {operation} does not fit into its memory limit. {labelled(str(error))}") from error
