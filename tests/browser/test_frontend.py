"""Workflows, widgets and panels in the real frontend: drawn on the canvas and as elements, dark and light."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from graphs import NOTES, to_prompt

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {p.stem: p for p in sorted((ROOT / "workflows").glob("*.json"))}
NAMING_FILES = {"VAELoader", "UNETLoader", "CLIPLoader", "LoadVideo", "ZeroWasteVAELoader"}
LOOKS = [("canvas", "dark"), ("canvas", "light"), ("vue", "dark"), ("vue", "light")]


def workflow(name: str, frames: int = 1) -> dict:
    graph = json.loads(WORKFLOWS[name].read_text())
    for node in graph["nodes"]:
        if node["type"] == "ZeroWasteVAEDemoClip":
            node["widgets_values"] = [frames]
        if node["type"] == "RepeatImageBatch":
            node["widgets_values"] = [1]
    return graph


def opened(browser, comfy, renderer: str = "canvas", palette: str = "dark", language: str = "en") -> None:
    settings = {"Comfy.VueNodes.Enabled": renderer == "vue", "Comfy.ColorPalette": palette, "Comfy.Locale": language}
    browser("open", url=f"http://127.0.0.1:{comfy.port}", settings=settings, width=1900, height=1250)


def node(nodes: list[dict], kind: str) -> dict:
    (found,) = (n for n in nodes if n["type"] == kind)
    return found


def luminance(colour: str) -> float:
    """0 (black) to 1 of an rgb(...) colour."""
    r, g, b = (float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def check_layout(panel: dict) -> None:
    """Nothing of a panel overlaps, is cut off or hard to read."""
    left, top, right, bottom = panel["body"]
    assert right - left > 100
    assert bottom <= panel["box"][3] + 1, "the panel is cut off below"
    assert not panel["clipped"]
    for box in panel["parts"]:
        assert box[0] >= left - 1
        assert box[2] <= right + 1
        assert box[1] >= top - 1
        assert box[3] <= bottom + 1
    rows = sorted(box for box in panel["lines"] if box[3] > box[1])
    rows.sort(key=lambda box: box[1])
    for above, below in pairwise(rows):
        assert below[1] >= above[3] - 1.5, "two lines overlap"
    assert abs(luminance(panel["colour"]) - luminance(panel["ground"])) > 0.4


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_workflow_opens_with_all_its_nodes(browser, comfy, name):
    opened(browser, comfy)
    nodes = browser("load", workflow=workflow(name))
    saved = workflow(name)["nodes"]
    assert {n["id"]: n["type"] for n in nodes} == {str(n["id"]): n["type"] for n in saved}
    assert [n["type"] for n in nodes if not n["known"] and n["type"] not in NOTES] == []
    # The models that some workflows need are not here: those nodes alone are marked.
    assert {n["type"] for n in nodes if n["errors"]} <= NAMING_FILES
    # What the frontend would queue is what the host tests run.
    expected = to_prompt(workflow(name), comfy.get("/object_info"))
    prompt = browser("prompt")
    ours = {key: n["inputs"] for key, n in prompt.items() if n["class_type"].startswith("ZeroWaste")}
    assert ours == {key: n["inputs"] for key, n in expected.items() if n["class_type"].startswith("ZeroWaste")}
    assert "GB" in browser("panel", name="zerowaste_plan", until="GB")["text"]
    assert browser("problems") == []


@pytest.mark.parametrize(("renderer", "palette"), LOOKS)
def test_plan_and_result_panels(browser, comfy, shots, renderer, palette):
    opened(browser, comfy, renderer, palette)
    nodes = browser("load", workflow=workflow("demo_encode_decode"))
    decode = node(nodes, "ZeroWasteVAEDecode")
    before = browser("panel", name="zerowaste_plan", until="Predicted")
    assert "288 × 176 px, 1 frame (from the nodes before)" in before["text"]
    assert "is assumed" not in before["text"]
    check_layout(before)
    browser("shot", file=str(shots / f"plan-{renderer}-{palette}.png"), nodes=[decode["id"]])
    # Another wish, another plan: tiles are drawn one by one.
    browser("set", node=decode["id"], widget="tiling", value="blended")
    browser("set", node=decode["id"], widget="tiling.tile", value=96)
    browser("set", node=decode["id"], widget="tiling.overlap", value=16)
    tiles = browser("panel", name="zerowaste_plan", until="blended tiles")
    assert tiles["tiles"] > 2
    assert f"{tiles['tiles']} blended tiles of 96 × 96 px" in tiles["text"]
    check_layout(tiles)
    browser("shot", file=str(shots / f"tiles-{renderer}-{palette}.png"), nodes=[decode["id"]])
    # Nodes in the host's cache send no result to a page that was not there when they ran.
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)
    assert browser("run") == ["execution_success", None]
    # The result is there at once, the plan for it a little later.
    after = browser("panel", name="zerowaste_plan", until="as in the last run")
    assert "Last run" in after["text"]
    assert "ms per frame" in after["text"]
    assert "optimisations not in use" in after["text"]
    check_layout(after)
    check_layout(browser("panel", name="zerowaste_result", until="Last run"))
    browser("shot", file=str(shots / f"result-{renderer}-{palette}.png"), nodes=[decode["id"]])
    browser("shot", file=str(shots / f"graph-{renderer}-{palette}.png"))
    assert browser("problems") == []


def test_a_wish_that_cannot_be_met_is_explained_before_the_run(browser, comfy):
    opened(browser, comfy)
    nodes = browser("load", workflow=workflow("demo_encode_decode"))
    decode = node(nodes, "ZeroWasteVAEDecode")["id"]
    browser("panel", name="zerowaste_plan", until="Predicted")
    browser("set", node=decode, widget="vram_gb", value=0.1)
    panel = browser("panel", name="zerowaste_plan", until="the target is 0.10 GB")
    assert "raise vram_gb" in panel["text"]
    check_layout(panel)
    browser("set", node=decode, widget="vram_gb", value=0)
    browser("set", node=decode, widget="tiling", value="blended")
    browser("set", node=decode, widget="tiling.overlap", value=9000)
    assert "overlap=9000" in browser("panel", name="zerowaste_plan", until="overlap=9000")["text"]


def test_size_is_picked_and_kept_in_the_workflow(browser, comfy):
    opened(browser, comfy)
    browser("load", workflow=workflow("demo_encode_decode"))
    browser("panel", name="zerowaste_plan", until="288 × 176")
    browser("choose", selector=".zerowaste-row select", value="832x480")
    panel = browser("panel", name="zerowaste_plan", until="832 × 480 px, 1 frame (picked above)")
    assert "GB" in panel["text"]
    saved = browser("serialized")
    decode = node(saved["nodes"], "ZeroWasteVAEDecode")
    assert decode["properties"]["zerowaste_size"] == {"width": 832, "height": 480}
    # The panel is no widget of the node: what is saved stays loadable without this frontend.
    assert decode["widgets_values"] == [0, 0, "auto", "auto", 0]
    browser("load", workflow=saved)
    assert "picked above" in browser("panel", name="zerowaste_plan", until="832 × 480")["text"]


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_optimize_says_which_toggles_do_nothing_here(browser, comfy, shots, renderer):
    opened(browser, comfy, renderer)
    nodes = browser("load", workflow=workflow("seedvr2_upscale_decode"))
    optimize = node(nodes, "ZeroWasteVAEOptimize")
    toggles = {name: value for name, kind, value in optimize["widgets"] if kind == "toggle"}
    assert len(toggles) == 9
    assert toggles["triton_fusion"] and not toggles["fp8"]
    panel = browser("panel", name="zerowaste_reasons", until="no CUDA device")
    assert "fp8, triton_fusion, composed_upsample, cuda_graphs" in panel["text"]
    check_layout(panel)
    browser("shot", file=str(shots / f"optimize-{renderer}.png"), nodes=[optimize["id"]])


def test_file_list_is_refreshed_by_its_button(browser, comfy):
    opened(browser, comfy)
    loader = node(browser("load", workflow=workflow("demo_encode_decode")), "ZeroWasteVAELoader")
    path = comfy.base / "models" / "vae" / "arrived_later.safetensors"
    path.write_bytes((comfy.base / "models" / "vae" / "tiny.safetensors").read_bytes())
    assert path.name not in browser("options", node=loader["id"], widget="vae_name")
    browser("press", node=loader["id"], widget="refresh", until=path.name, listed="vae_name")
    path.unlink()


def test_chinese(browser, comfy, shots):
    opened(browser, comfy, language="zh")
    nodes = browser("load", workflow=workflow("demo_encode_decode"))
    panel = browser("panel", name="zerowaste_plan", until="GB")
    assert "预计" in panel["text"]
    check_layout(panel)
    browser("shot", file=str(shots / "plan-zh.png"), nodes=[node(nodes, "ZeroWasteVAEDecode")["id"]])
