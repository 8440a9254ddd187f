"""Refusals are known in Chinese, in the very words that the code has."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from zerowaste_vae.engine.options import BY_DEFAULT
from zerowaste_vae.engine.planning import refusals
from zerowaste_vae.engine.request import NO_NATIVE_BLEND, NO_TRAINED_TILES
from zerowaste_vae.nodes.reports import labelled

ROOT = Path(__file__).resolve().parents[2]
CHINESE = json.loads((ROOT / "locales" / "zh" / "main.json").read_text())["zerowaste"]["said"]
ERRORS = {"PlanError", "InputError", "CheckpointError", "NonFiniteError"}
#: Whose errors reach people through the nodes. Not here: what is wrong inside a file and why a family's sizes are none,
#: what only callers of the Python interface can do, and malformed questions of the panel.
PLACES = ("nodes/*.py", "engine/planning/*.py", "engine/runtime/*.py", "engine/extras/graphs/*.py",
          "engine/extras/residents/*.py", "engine/network/tiles.py", "engine/loader.py")
PLACES += ("engine/extras/distributed/devices.py", "engine/extras/distributed/several.py", "engine/request.py")
PLACES += ("engine/families/*/running/*.py",)
PLACES += tuple(f"engine/execution/{name}.py" for name in ("core", "guard", "noise", "progress"))
PYTHON_ONLY = (
    "out is ", "start=", "frames={} ", "seed={}", "noise={}", "timestep={}", "the decoder of {} takes no",
    "the latents of {} take no share",
    "{} is a list of at ", "{} is a text of at most", "{}={} is not a number", "{}={} is out of bounds",
    "{} is not one of on", "precision={}", "range='signed'", "device={}", "metadata norm_num_groups={}",
    "frames come one after the other", "options is an Options", "{} is a tensor", "{} is an empty list",
    "{} of {} is none", "{}: a picture of mode", "{}: item {} of the list", "{}={} cannot be called",
)  # fmt: skip
PLACE = re.compile(r"\{\w+\}")


def template(node: ast.expr) -> str | None:
    """A string with {} for what is filled in; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def bare(text: str) -> str:
    """With {} for numbers and for whatever is filled in."""
    return re.sub(r"\d+(\.\d+)?|#", "{}", PLACE.sub("{}", text))


def code(*places: str) -> list[ast.AST]:
    files = [path for place in places for path in sorted(ROOT.glob(place))]
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


def raised() -> list[ast.Call]:
    calls = [node for node in code(*PLACES) if isinstance(node, ast.Call) and node.args]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ERRORS]


SENTENCES = sorted({text for text in (template(call.args[0]) for call in raised()) if text} | {NO_NATIVE_BLEND})


PLANNED = [text for name, text in vars(refusals).items() if name.isupper()] + [NO_TRAINED_TILES]


@pytest.mark.parametrize("text", PLANNED)
def test_every_sentence_of_plans_is_known(text):
    said = labelled(text)
    assert sorted(PLACE.findall(said)) == sorted(PLACE.findall(CHINESE[said]))


@pytest.mark.parametrize("text", [text for text in SENTENCES if text != "{}: {}" and not text.startswith(PYTHON_ONLY)])
def test_every_error_of_the_nodes_is_known(text):
    known = {bare(key) for key in CHINESE}
    # Those of plans, and what replaces them when memory runs out, have the widgets' labels.
    assert {bare(text), bare(labelled(text))} & known


def test_plans_are_refused_with_those_sentences_only():
    """A refusal that is no string in its place is made of them, or is a reason of its own."""
    others = {ast.unparse(call.args[0]) for call in raised() if template(call.args[0]) is None}
    assert {text for text in others if not re.search(r"refusal|self\._(smallest|long_chunk)\(", text)} == {"why", "off"}


def test_what_is_known_is_what_the_code_says():
    """A sentence that is worded anew would be shown in English."""
    strings = {template(node) for node in code("engine/**/*.py", "nodes/*.py") if isinstance(node, ast.expr)} - {None}
    written = {bare(text) for text in strings} | {bare(labelled(text)) for text in SENTENCES}
    written |= {bare(labelled(text)) for text in PLANNED}
    # What is switched off by default says why behind that.
    assert [text for text in CHINESE if bare(text.removeprefix(f"{BY_DEFAULT}: ")) not in written] == []
    assert [key for key, text in CHINESE.items() if key.count("#") != text.count("#")] == []
    assert [key for key, text in CHINESE.items() if sorted(PLACE.findall(key)) != sorted(PLACE.findall(text))] == []
