"""The example workflow and the API prompt that the host tests run are the same graph."""

from __future__ import annotations

import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_workflow_and_its_twin_agree():
    workflow = json.loads((REPOSITORY / "workflows" / "demo_encode_decode.json").read_text())
    twin = json.loads((REPOSITORY / "tests" / "host" / "prompts" / "demo.json").read_text())
    nodes = {str(node["id"]): node for node in workflow["nodes"] if node["type"] != "Note"}
    assert {name: node["type"] for name, node in nodes.items()} == {n: d["class_type"] for n, d in twin.items()}
    links = {number: [str(source), slot] for number, source, slot, *_ in workflow["links"]}
    for name, node in nodes.items():
        inputs = twin[name]["inputs"]
        linked = {entry["name"]: links[entry["link"]] for entry in node["inputs"]}
        assert linked == {key: value for key, value in inputs.items() if isinstance(value, list)}
        assert node["widgets_values"] == [value for value in inputs.values() if not isinstance(value, list)]
