"""Questions to the planner: which are refused."""

from __future__ import annotations

import random

import pytest
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.request import TILINGS
from zerowaste_vae.nodes.panel import LIMITS, Question


@pytest.mark.parametrize(
    "query",
    [
        {"width": "0"},
        {"width": "7"},
        {"height": "-720"},
        {"width": "16385"},
        {"frames": "0"},
        {"frames": "1e3"},
        {"frames": "9" * 400},
        {"frames": "１２"},
        {"frames": "1_000"},
        {"batch": "4097"},
        {"tile": "-1"},
        {"overlap": "20000"},
        {"chunk": "1.5"},
        {"vram_gb": "nan"},
        {"vram_gb": "inf"},
        {"vram_gb": "-1"},
        {"ram_gb": "1e9"},
        {"tiling": "../../etc"},
        {"precision": "fp64"},
        {"output": ""},
        {"model": "x" * 600},
        {"model": "a\nb"},
        {"path": "/etc/passwd"},
        {"options": "x"},
        {"off": "everything"},
        {"off": ""},
        {"": ""},
    ],
    ids=str,
)
def test_bad_questions_are_refused_in_one_line(query):
    with pytest.raises(InputError) as refused:
        Question.parse(query)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


#: Texts that some parser somewhere takes for a number, a name or a path.
NASTY = (
    "", " ", "0", "-0", "-1", "1 ", "+5", "0x10", "1e1", "1e309", "-inf", "NaN", "Infinity", "9" * 23, "9" * 5000,
    "1_0", "\u0663", "\uff11", "1\u0000", "\ud800", "\U0001f600", "None", "true", "[]", "{}", "1;2", "1,2", "'", '"',
    "../../etc/passwd", "/etc/passwd", "C:\\Windows", "file:///etc", "%2e%2e%2f", "\\\\host\\share", "~", "$HOME",
    "a\r\nb", "\x7f", "<script>", "auto", "blended", "exact", "fp8", "float16", "cuda_graphs", "64", "720", "1.5",
)  # fmt: skip


def test_no_text_gets_past_the_bounds():
    """Random pairs of names and nasty texts: refused in one short line, or numbers within their limits."""
    names = (*LIMITS, "model", "tiling", "precision", "output", "off", "path", "__class__", "options")
    pick, parsed = random.Random(0), 0
    for _ in range(4000):
        query = {name: pick.choice(NASTY) for name in pick.sample(names, pick.randint(1, 4))}
        try:
            question = Question.parse(query)
        except InputError as refused:
            assert "\n" not in str(refused) and len(str(refused)) < 400, query
            continue
        parsed += 1
        for name, most in LIMITS.items():
            assert type(getattr(question, name)) in (int, float) and 0 <= getattr(question, name) <= most, query
        assert question.tiling in TILINGS and len(question.model) <= 512 and question.model.isprintable()
    assert parsed > 60


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_limits_themselves_are_allowed(name):
    question = Question.parse({name: f"{LIMITS[name]:.0f}"})
    assert getattr(question, name) == LIMITS[name]


@pytest.mark.parametrize("name, text", [("vram_gb", "-1"), ("vram_gb", "-0.5"), ("tile", "-8"), ("frames", "-1")])
def test_values_below_0_are_called_so(name, text):
    with pytest.raises(InputError, match=f"^{name}={text} is below 0: give 0 or more$"):
        Question.parse({name: text})
