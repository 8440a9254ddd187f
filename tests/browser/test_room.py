"""What Use Zero-Waste VAE leaves as it was: links, looks, groups and room, and what it says of the rest."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from adopting import ENTRY, EVERYWHERE, of, undo_to
from pages import opened
from test_adopt import graph

pytestmark = pytest.mark.host

RENDERERS = ["canvas", "vue"]
#: Deprecated parts of the frontend that this pack's own code touches, from now on.
WATCH = """(() => {
  window.__deprecated = [];
  LiteGraph.alwaysRepeatWarnings = true;
  LiteGraph.onDeprecationWarning.push((message) => {
    const { stack } = new Error();
    if (stack.includes("ComfyUI-ZeroWasteVAE")) window.__deprecated.push(`${message} ${stack}`);
  });
})()"""
MANY = "{ id: n.id, title: n.title, type: n.type, mode: n.mode, flags: n.flags, color: n.color, shape: n.shape }"
GROUPS = """app.graph.groups.map((g) => {
  g.recomputeInsideNodes();
  return [g.title, [...g.children].map((n) => n.title).sort(), [...g.pos], [...g.size]];
})"""


def crowd() -> dict:
    """Decodes in every look, close together in one group and beside another, with pictures behind them."""
    loaded = graph("not_a_vae.safetensors", "VAEDecode", ())
    loader, latent, decode, preview = loaded["nodes"]
    loader |= {"pos": [40, 60], "title": "loader"}
    latent |= {"pos": [40, 260], "title": "latent"}
    looks = {
        "plain": {"color": "#322", "bgcolor": "#533"}, "bypassed": {"mode": 4}, "muted": {"mode": 2},
        "collapsed": {"flags": {"collapsed": True}}, "pinned": {"flags": {"pinned": True}, "shape": 1},
    }  # fmt: skip
    nodes, links = [loader, latent], []
    for i, (title, look) in enumerate(looks.items()):
        number, tiled = 10 + i, title == "pinned"
        inputs = [{"name": name, "type": kind, "link": 3 * i + j} for j, name, kind in (
            (1, "samples", "LATENT"), (2, "vae", "VAE"))]  # fmt: skip
        nodes.append(decode | {
            "id": number, "title": title, "pos": [400, 80 + 110 * i], "size": [210, 140 if tiled else 46],
            "type": "VAEDecodeTiled" if tiled else "VAEDecode", "widgets_values": [512, 64, 64, 8] if tiled else [],
            "inputs": inputs,
            "outputs": [{"name": "IMAGE", "type": "IMAGE", "links": [3 * i + 3]}],
        } | look)  # fmt: skip
        nodes.append(preview | {
            "id": 20 + i, "title": f"preview {title}", "pos": [650 + 230 * (i % 2), 80 + 110 * i], "size": [200, 46],
            "inputs": [{"name": "images", "type": "IMAGE", "link": 3 * i + 3}],
        })  # fmt: skip
        links += [[3 * i + 1, 2, 0, number, 0, "LATENT"], [3 * i + 2, 1, 0, number, 1, "VAE"],
                  [3 * i + 3, number, 0, 20 + i, 0, "IMAGE"]]  # fmt: skip
    latent["outputs"][0]["links"] = [link[0] for link in links if link[1] == 2]
    loader["outputs"][0]["links"] = [link[0] for link in links if link[1] == 1]
    below = latent | {"id": 40, "title": "below", "pos": [400, 760], "outputs": []}
    groups = [
        {"id": number, "title": title, "bounding": box, "color": "#3f789e", "flags": {}}
        for number, title, box in ((1, "decodes", [380, 30, 245, 665]), (2, "under", [380, 705, 340, 200]))
    ]
    last = {"last_node_id": 50, "last_link_id": 50}
    return loaded | {"nodes": [*nodes, below], "links": links, "groups": groups} | last


def told(browser, words: str) -> str:
    """The page's text, once its messages hold these words."""
    for _ in range(50):
        text = browser("js", source="document.body.innerText")
        if words in text:
            return text
        time.sleep(0.2)
    pytest.fail(f"{words!r} is not on the page")


def overlapping(browser) -> list[tuple[str, str]]:
    """Pairs of nodes that cover each other, their titles included."""
    nodes = browser("js", source="""app.graph.nodes.map((n) => [n.title, n.pos[0], n.pos[1] - 30,
      n.pos[0] + (n.flags.collapsed ? 100 : n.size[0]), n.pos[1] + (n.flags.collapsed ? 0 : n.size[1])])""")
    return [(a[0], b[0]) for a, b in combinations(nodes, 2)
            if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]]  # fmt: skip


@pytest.mark.parametrize("renderer", RENDERERS)
def test_looks_groups_and_room_are_kept(browser, comfy, shots, renderer):
    opened(browser, comfy, renderer)
    browser("load", workflow=crowd())
    browser("js", source="app.extensionManager.command.execute('Comfy.Canvas.FitView').then(() => 1)")
    time.sleep(1)
    before = browser("prompt")
    looks = browser("js", source=f"app.graph.nodes.map((n) => ({MANY}))")
    groups = browser("js", source=GROUPS)
    assert overlapping(browser) == []
    browser("js", source=WATCH)
    browser("js", source=EVERYWHERE)
    told(browser, "Not carried over: temporal_size, temporal_overlap of VAE Decode (Tiled).")
    time.sleep(2)
    browser("view", file=str(shots / f"room-kept-{renderer}.png"))
    now = {n["title"]: n for n in browser("js", source=f"app.graph.nodes.map((n) => ({MANY}))")}
    for old in looks:
        kept = ("mode", "color", "shape", "flags")
        assert {key: now[old["title"]].get(key) for key in kept} == {key: old.get(key) for key in kept}, old["title"]
        if old["type"].startswith("VAEDecode"):
            assert now[old["title"]]["type"] == "ZeroWasteVAEDecode"
    assert overlapping(browser) == []
    for (name, held, pos, size), (_, then, at, was) in zip(browser("js", source=GROUPS), groups, strict=True):
        assert held == then, name
        assert size[0] >= was[0] and size[1] >= was[1] and pos[0] >= at[0] and pos[1] >= at[1]
    assert browser("js", source="window.__deprecated") == []
    undo_to(browser, before)
    assert browser("js", source=GROUPS) == groups


@pytest.mark.parametrize("renderer", RENDERERS)
def test_links_into_growing_inputs_are_kept(browser, comfy, renderer):
    """Batch Images has as many inputs as it needs: the prompt has the same picture at the same place."""
    opened(browser, comfy, renderer)
    loaded = graph("tiny.safetensors", "VAEDecode", ())
    picture = {"id": 5, "type": "EmptyImage", "pos": [1200, 300], "size": [300, 120], "mode": 0, "order": 0,
               "flags": {}, "properties": {}, "widgets_values": [64, 48, 1, 0], "inputs": [],
               "outputs": [{"name": "IMAGE", "type": "IMAGE", "links": []}]}  # fmt: skip
    loaded["nodes"].append(picture)
    browser("load", workflow=loaded)
    find = "app.graph.getNodeById(%d)"
    browser("js", source=f"""(async () => {{
      const batch = LiteGraph.createNode("BatchImagesNode");
      app.graph.add(batch);
      batch.pos = [1700, 60];
      {find % 3}.connect(0, batch, 0);
      await new Promise((done) => setTimeout(done, 500));
      {find % 5}.connect(0, batch, 1);
      await new Promise((done) => setTimeout(done, 500));
      batch.connect(0, {find % 4}, 0);
      app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState?.();
    }})()""")
    before = browser("prompt")
    ((number, inputs),) = of(before, "BatchImagesNode").items()
    assert inputs["images.image0"] == ["3", 0] and inputs["images.image1"] == ["5", 0]
    browser("js", source=WATCH)
    browser("js", source=EVERYWHERE)
    after = browser("prompt")
    ((ours, _),) = of(after, "ZeroWasteVAEDecode").items()
    assert after[number]["inputs"] == inputs | {"images.image0": [ours, 0]}
    assert browser("js", source="window.__deprecated") == []


def test_what_an_encode_is_told_of_its_images_is_kept(browser, comfy):
    """Newer hosts' encodes have that choice, and so has ours."""
    opened(browser, comfy)
    loaded = graph("tiny.safetensors", "VAEEncode", ())
    loaded["links"], loaded["nodes"][2]["inputs"], loaded["nodes"][2]["outputs"] = [], [], []
    browser("load", workflow=loaded)
    choose = """(app.graph.getNodeById(3).widgets.find((w) => w.name === "encode_as")
      ?? app.graph.getNodeById(3).addWidget("combo", "encode_as", "Auto", () => {},
        { values: ["Auto", "Video Frames", "Individual Images"] })).value = "Individual Images" """
    browser("js", source=choose.replace("\n", " "))
    browser("js", source=EVERYWHERE)
    kept = """app.graph.nodes.find((n) => n.comfyClass === "ZeroWasteVAEEncode").widgets
      .find((w) => w.name === "encode_as").value"""
    assert browser("js", source=kept.replace("\n", " ")) == "Individual Images"


def test_nodes_that_a_host_leaves_out_are_not_offered(browser, comfy):
    opened(browser, comfy)
    browser("load", workflow=graph("tiny.safetensors", "VAEDecode", ()))
    kinds = "LiteGraph.registered_node_types"
    names = ["ZeroWasteVAEDecode", "ZeroWasteVAEOptimize", "ZeroWasteVAEDecodeToVideo"]
    browser("js", source=f"void (window.__kinds = {{ ...{kinds} }}, {names}.forEach((n) => delete {kinds}[n]))")
    try:
        assert ENTRY not in browser("menu", node="3") and ENTRY not in browser("menu", node="1")
        browser("js", source=EVERYWHERE)
        told(browser, "There is no VAE Decode")
    finally:
        browser("js", source=f"void Object.assign({kinds}, window.__kinds)")
