"""Help pages and translations cover every node, widget and output that the host offers."""

from __future__ import annotations

import importlib.util
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
    chinese = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text())
    for name, node in nodes.items():
        widgets = {key: rest for key, (kind, *rest) in inputs(node).items() if kind not in LINKS}
        page = " ".join(comfy.text(f"{PACK}/{name}.md").split())
        assert page.startswith(f"# {node['display_name']} ")
        translated = comfy.text(f"{PACK}/{name}/zh.md")
        assert translated.startswith(f"# {chinese[name]['display_name']}\n")
        for key, (options, *_) in widgets.items():
            plain = key.rpartition(".")[2]
            assert f"**{options['display_name']}** (`{plain}`)" in page, key
            label = chinese[name]["inputs"][key.replace(".", "_")]["name"]
            assert f"**{label}**(`{plain}`)" in translated, key


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
        options = {key: rest[0] if rest else {} for key, (_, *rest) in inputs(node).items()}
        bare = [key for key, has in options.items() if not (has.get("tooltip") and has.get("display_name"))]
        assert bare == [], name
        assert all(node["output_tooltips"]), name


def test_the_panels_texts_are_complete_in_every_language(comfy):
    texts = comfy.get("/i18n")
    english = texts["en"]["zerowaste"]
    used = set()
    for script in (ROOT / "web" / "js").glob("*.js"):
        # t("key") and t(condition ? "key" : "other", ...); a condition compares with texts of the server's.
        for call in re.findall(r"\bt\(([^()]*)", script.read_text()):
            used |= set(re.findall(r"\"([a-z_]+)\"", re.sub(r"[=!]== \"\w+\"", "", call)))
    assert len(used) > 20
    assert used <= english.keys()
    chinese = texts["zh"]["zerowaste"]
    assert chinese.keys() - {"said", "running"} == english.keys()
    for key, text in english.items():
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", chinese[key])), key


def test_every_node_is_translated(comfy):
    chinese = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text())
    nodes = ours(comfy)
    assert chinese.keys() == nodes.keys()
    assert comfy.get("/i18n")["zh"]["nodeDefs"].keys() >= nodes.keys()
    for name, node in nodes.items():
        assert chinese[name]["inputs"].keys() == {key.replace(".", "_") for key in inputs(node)}, name
        assert chinese[name]["outputs"].keys() == {str(i) for i in range(len(node["output_name"]))}, name
        texts = [chinese[name], *chinese[name]["inputs"].values(), *chinese[name]["outputs"].values()]
        assert all(text.get("name") or text["display_name"] for text in texts), name
        assert all(text["tooltip"] for text in texts[1:]), name


def test_the_english_base_is_what_the_nodes_say(comfy):
    """tools/base_locale.py writes it."""
    written = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text())
    assert written == base_locale().base(comfy.get("/object_info"))


def test_labels_have_units_in_both_languages(comfy):
    for language in ("en", "zh"):
        nodes = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text())
        for node in nodes.values():
            for key, text in node["inputs"].items():
                unit = {"vram_gb": "(GB)", "ram_gb": "(GB)", "min_db": "(dB)"}.get(key, "")
                assert unit in text["name"]
                assert "target" not in text["name"]


def base_locale():
    spec = importlib.util.spec_from_file_location("base_locale", ROOT / "tools" / "base_locale.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_stage_and_event_of_a_report_has_a_name(comfy):
    english = comfy.get("/i18n")["en"]["zerowaste"]
    source = "".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))
    stages = set(re.findall(r"\.stage\(\"(\w+)\"\)", source)) | {"load", "decode", "encode"}
    assert len(stages) > 3
    assert {f"stage_{name}" for name in stages} | {f"event_{name}" for name in EVENTS} <= english.keys()
