"""The pack's subgraph blueprints: the host offers them, and each runs once a latent and a VAE are connected."""

from __future__ import annotations

import json

import pytest
from pages import ROOT, opened

pytestmark = pytest.mark.host

BLUEPRINTS = {path.stem: path for path in sorted((ROOT / "subgraphs").glob("*.json"))}
#: Puts the demo clip in front of the only node and a saving node behind it.
CONNECT = """(() => {
  const [block] = app.rootGraph.nodes;
  const add = (kind, x, y) => {
    const node = LiteGraph.createNode(kind);
    app.rootGraph.add(node);
    node.pos = [x, y];
    return node;
  };
  const wire = (from, slot, to, name) => from.connect(slot, to, to.inputs.findIndex((input) => input.name === name));
  const [loader, clip] = [add("ZeroWasteVAELoader", -900, 0), add("ZeroWasteVAEDemoClip", -900, 300)];
  clip.widgets.find((widget) => widget.name === "frames").value = 1;
  const encode = add("ZeroWasteVAEEncode", -450, 0);
  wire(clip, 0, encode, "pixels");
  wire(loader, 0, encode, "vae");
  wire(encode, 0, block, "samples");
  wire(loader, 0, block, "vae");
  const video = block.outputs[0].type === "VIDEO";
  wire(block, 0, add(video ? "SaveVideo" : "PreviewImage", 600, 0), video ? "video" : "images");
})()"""


def test_the_host_offers_them(comfy):
    offered = comfy.get("/global_subgraphs").values()
    ours = {one["name"]: one["info"]["node_pack"] for one in offered if one["source"] == "custom_node"}
    assert ours == dict.fromkeys(BLUEPRINTS, "custom_nodes.ComfyUI-ZeroWasteVAE")
    assert len(BLUEPRINTS) == 2


def test_the_node_search_lists_nodes_before_them(browser, comfy):
    """ComfyUI's own decode first, then ours."""
    opened(browser, comfy)
    browser("load", workflow={"nodes": [], "links": [], "version": 0.4})
    rows = browser("search", words="decode").split("\n")
    names = ["VAE Decode", "Zero-Waste VAE Decode", *BLUEPRINTS]
    assert next(name for name in rows if name in names) == "VAE Decode"
    places = [rows.index(name) for name in names]
    assert places == sorted(places)


@pytest.mark.parametrize("name", BLUEPRINTS)
def test_each_runs(browser, comfy, shots, name):
    opened(browser, comfy)
    graph = json.loads(BLUEPRINTS[name].read_text(encoding="utf-8"))
    (inner,) = graph["definitions"]["subgraphs"]
    assert (inner["name"], inner["category"]) == (name, "Zero-Waste VAE") and inner["description"]
    browser("load", workflow=graph)
    browser("js", source=f"void {CONNECT}")
    prompt = browser("prompt")
    # Values by name: a widget that came since would have moved those behind it.
    for node in inner["nodes"]:
        (ran,) = (n["inputs"] for n in prompt.values() if n["class_type"] == node["type"])
        named = node["widgets_values_named"]
        assert {key: ran[key] for key in named if key in ran} == {key: named[key] for key in named if key in ran}
    browser("view", file=str(shots / f"blueprint-{name.split()[0]}.png"))
    assert browser("run") == ["execution_success", None]
