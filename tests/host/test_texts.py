"""Help pages and translations cover every node, widget and output that the host offers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from zerowaste_vae.engine.report import EVENTS

pytestmark = pytest.mark.host

LINKS = ("VAE", "LATENT", "IMAGE")

ROOT = Path(__file__).resolve().parents[2]
PACK = "/extensions/ComfyUI-ZeroWasteVAE/docs"


def ours(comfy) -> dict[str, dict]:
    return {name: node for name, node in comfy.get("/object_info").items() if name.startswith("ZeroWaste")}


def inputs(node: dict) -> dict[str, list]:
    """All inputs, with the ones nested in a dynamic choice."""
    found = {}
    for name, (kind, *rest) in {**node["input"].get("required", {}), **node["input"].get("optional", {})}.items():
        found[name] = [kind, *rest]
        if kind == "COMFY_DYNAMICCOMBO_V3":
            for option in rest[0]["options"]:
                found |= {f"{name}.{key}": spec for key, spec in option["inputs"].get("required", {}).items()}
    return found


def test_every_node_has_a_help_page_that_names_its_widgets(comfy):
    nodes = ours(comfy)
    assert {p.stem for p in (ROOT / "web" / "docs").glob("*.md")} == nodes.keys()
    for name, node in nodes.items():
        page = comfy.text(f"{PACK}/{name}.md")
        assert page.startswith(f"# {node['display_name']}\n")
        widgets = [key.rpartition(".")[2] for key, (kind, *_) in inputs(node).items() if kind not in LINKS]
        assert [key for key in widgets if f"**{key}**" not in page] == []


def test_pictures_of_help_pages_are_served_and_small(comfy):
    pages = list((ROOT / "web" / "docs").glob("*.md"))
    pictures = {link for page in pages for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())}
    assert pictures
    for link in pictures:
        data = comfy.bytes(f"{PACK}/{link}")
        assert data.startswith(b"\x89PNG")
        assert len(data) < 300_000


def test_every_widget_has_a_tooltip(comfy):
    for name, node in ours(comfy).items():
        widgets = {key: rest for key, (kind, *rest) in inputs(node).items() if kind not in LINKS}
        bare = [key for key, rest in widgets.items() if not (rest and rest[0].get("tooltip"))]
        assert bare == [], name


def test_the_panels_texts_are_complete_in_every_language(comfy):
    texts = comfy.get("/i18n")
    english = texts["en"]["zerowaste"]
    used = set()
    for script in (ROOT / "web" / "js").glob("*.js"):
        for call in re.findall(r"\bt\([^)]*", script.read_text()):
            used |= set(re.findall(r"\"(\w+)\"", call))
    assert len(used) > 20
    assert used <= english.keys()
    chinese = texts["zh"]["zerowaste"]
    assert chinese.keys() == english.keys()
    for key, text in english.items():
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", chinese[key])), key


def test_every_node_is_translated(comfy):
    chinese = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text())
    nodes = ours(comfy)
    assert chinese.keys() == nodes.keys()
    assert comfy.get("/i18n")["zh"]["nodeDefs"].keys() >= nodes.keys()
    for name, node in nodes.items():
        assert chinese[name]["inputs"].keys() == {key for key in inputs(node) if "." not in key}, name
        named = [i for i, output in enumerate(node["output_name"]) if output != "VAE"]
        assert chinese[name]["outputs"].keys() == {str(i) for i in named}, name


def test_every_stage_and_event_of_a_report_has_a_name(comfy):
    english = comfy.get("/i18n")["en"]["zerowaste"]
    source = "".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))
    stages = set(re.findall(r"\.stage\(\"(\w+)\"\)", source)) | {"load"}
    assert len(stages) > 3
    assert {f"stage_{name}" for name in stages} | {f"event_{name}" for name in EVENTS} <= english.keys()
