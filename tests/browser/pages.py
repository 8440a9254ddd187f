"""Opening the frontend in one of its looks, and the workflows that are loaded there."""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {p.stem: p for p in sorted((ROOT / "workflows").glob("*.json"))}
#: Of tests that do not run in both: "canvas" or "vue".
RENDERER = os.environ.get("COMFY_RENDERER", "canvas")
#: Saved by later states of the pack with no value at its default: {"workflow", "prompt"}, all nodes each.
STATES = {p.stem: p for p in sorted((ROOT / "tests" / "fixtures" / "workflows" / "states").glob("*.json"))}
#: As the first version saved them.
SAVED = {p.stem: p for p in sorted((ROOT / "tests" / "fixtures" / "workflows").glob("*.json"))}


def opened(browser, comfy, renderer: str = RENDERER, palette: str = "dark", language: str = "en") -> None:
    settings = {"Comfy.VueNodes.Enabled": renderer == "vue", "Comfy.ColorPalette": palette, "Comfy.Locale": language}
    browser("open", url=f"http://127.0.0.1:{comfy.port}", settings=settings, width=1900, height=1250)


def workflow(name: str, frames: int = 1) -> dict:
    graph = json.loads(WORKFLOWS[name].read_text())
    for node in graph["nodes"]:
        if node["type"] == "ZeroWasteVAEDemoClip":
            node["widgets_values"] = [frames]
        if node["type"] == "RepeatImageBatch":
            node["widgets_values"] = [1]
    return graph


def node(nodes: list[dict], kind: str) -> dict:
    (found,) = (n for n in nodes if n["type"] == kind)
    return found
