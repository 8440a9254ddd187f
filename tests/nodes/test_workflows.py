"""Each example workflow and the API prompt of the same graph agree; the host tests run or check the prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TWINS = {"demo_encode_decode": "demo", "wan_text_to_video": "wan_text_to_video"}
#: Widgets that the interface puts behind a seed; a prompt has no such input.
AFTER_SEED = ("fixed", "randomize", "increment", "decrement")


def test_every_workflow_has_a_twin():
    assert {path.stem for path in (REPOSITORY / "workflows").glob("*.json")} == set(TWINS)


@pytest.mark.parametrize(("workflow", "twin"), TWINS.items())
def test_workflow_and_its_twin_agree(workflow, twin):
    workflow = json.loads((REPOSITORY / "workflows" / f"{workflow}.json").read_text())
    twin = json.loads((REPOSITORY / "tests" / "host" / "prompts" / f"{twin}.json").read_text())
    nodes = {str(node["id"]): node for node in workflow["nodes"] if node["type"] != "Note"}
    assert {name: node["type"] for name, node in nodes.items()} == {n: d["class_type"] for n, d in twin.items()}
    links = {number: [str(source), slot] for number, source, slot, *_ in workflow["links"]}
    for name, node in nodes.items():
        inputs = twin[name]["inputs"]
        linked = {entry["name"]: links[entry["link"]] for entry in node["inputs"]}
        assert linked == {key: value for key, value in inputs.items() if isinstance(value, list)}
        widgets = [value for value in node["widgets_values"] if value not in AFTER_SEED]
        assert widgets == [value for value in inputs.values() if not isinstance(value, list)]
