"""Use Zero-Waste VAE: one action on nodes of each kind, alone and with neighbours, and what it leaves as it was."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import running
from adopting import ANYWHERE, ENTRY, INTO_SUBGRAPH, adopt, nodes_anywhere, of, undo_to, until_kinds
from pages import opened
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.host


def tiny_wan(comfy, host_places) -> Path:
    """A VAE that the host's own loader takes."""
    path = comfy.base / "models" / "vae" / "tiny_wan.safetensors"
    if not path.exists():
        running.write_tiny_wan(host_places, path)
    return path


def graph(vae: str, kind: str = "VAEDecodeTiled", values: tuple = (384, 96, 64, 8)) -> dict:
    def entry(number: int, kind: str, values: list, inputs: list, outputs: list, y: int) -> dict:
        return {
            "id": number, "type": kind, "pos": [400 * number, y], "size": [300, 120], "mode": 0, "order": number,
            "flags": {}, "properties": {}, "widgets_values": values, "inputs": inputs, "outputs": outputs,
        }  # fmt: skip

    return {
        "version": 0.4, "last_node_id": 9, "last_link_id": 9, "groups": [], "extra": {},
        "links": [[1, 1, 0, 3, 1, "VAE"], [2, 2, 0, 3, 0, "LATENT"], [3, 3, 0, 4, 0, "IMAGE"]],
        "nodes": [
            entry(1, "VAELoader", [vae], [], [{"name": "VAE", "type": "VAE", "links": [1]}], 60),
            entry(
                2, "EmptyHunyuanLatentVideo", [64, 48, 5, 1], [],
                [{"name": "LATENT", "type": "LATENT", "links": [2]}], 300,
            ),
            entry(
                3, kind, list(values),
                [{"name": "samples", "type": "LATENT", "link": 2}, {"name": "vae", "type": "VAE", "link": 1}],
                [{"name": "IMAGE", "type": "IMAGE", "links": [3]}], 60,
            ),
            entry(4, "PreviewImage", [], [{"name": "images", "type": "IMAGE", "link": 3}], [], 60),
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ours", "values"),
    [
        ("VAEDecode", ["ZeroWasteVAEDecode"], {"tiling": "auto"}),
        ("VAEDecodeTiled", ["ZeroWasteVAEDecode"], {"tiling": "blended", "tiling.tile": 256, "tiling.overlap": 32}),
        ("VAEEncode", ["ZeroWasteVAEEncode"], {"tiling": "auto"}),
        ("VAEEncodeTiled", ["ZeroWasteVAEEncode"], {"tiling": "blended", "tiling.tile": 256, "tiling.overlap": 32}),
        ("VAELoader", ["VAELoader", "ZeroWasteVAEOptimize"], {"precision": "auto"}),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in a subgraph"])
def test_each_node_has_the_entry(browser, comfy, kind, ours, values, inside):
    """Unconnected ones too; the tiles of those whose VAE is not known are kept."""
    opened(browser, comfy)
    tiles = [256, 32, 64, 8] if kind.endswith("Tiled") else ["tiny.safetensors"] if kind == "VAELoader" else []
    place = {"id": 1, "type": kind, "pos": [400, 300], "size": [300, 120], "mode": 0, "order": 0, "flags": {}}
    alone = {"nodes": [{**place, "properties": {}, "widgets_values": tiles}], "links": [], "version": 0.4}
    browser("load", workflow={**alone, "last_node_id": 1, "last_link_id": 0})
    if inside:
        wrapped = "(app.rootGraph.convertToSubgraph(new Set(app.rootGraph.nodes)), app.rootGraph.serialize())"
        browser("load", workflow=browser("js", source=wrapped))
        browser("js", source=INTO_SUBGRAPH)
    ((number, _),) = nodes_anywhere(browser)
    browser("menu", node=number, entry=ENTRY)
    until_kinds(browser, ours)
    held = f"""Object.fromEntries(({ANYWHERE}).find((n) => n.type === "{ours[-1]}").widgets
      .filter((w) => {json.dumps(list(values))}.includes(w.name)).map((w) => [w.name, w.value]))"""
    assert browser("js", source=held) == values
    browser("key", keys="Control+z")
    until_kinds(browser, [kind])
    browser("js", source="void app.canvas.setGraph(app.rootGraph)")


def test_tiles_of_a_checkpoint_that_the_engine_runs_are_not_needed(browser, comfy):
    """The VAE lies in a checkpoint, whose header is all that is read, and whose name says nothing."""
    folder = comfy.base / "models" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    inner = load_file(comfy.base / "models" / "vae" / "tiny.safetensors")
    tensors = {f"vae.{name}": tensor for name, tensor in inner.items()}
    save_file(tensors, folder / "merged.safetensors", {"norm_num_groups": "8"})
    loaded = graph("merged.safetensors")
    loaded["links"][0] = [1, 1, 2, 3, 1, "VAE"]
    loaded["nodes"][0] |= {
        "type": "CheckpointLoaderSimple",
        "outputs": [
            {"name": "MODEL", "type": "MODEL", "links": []}, {"name": "CLIP", "type": "CLIP", "links": []},
            {"name": "VAE", "type": "VAE", "links": [1]},
        ],
    }  # fmt: skip
    opened(browser, comfy)
    browser("load", workflow=loaded)
    adopt(browser, "3")
    ((_, inputs),) = of(browser("prompt"), "ZeroWasteVAEDecode").items()
    assert (inputs["tiling"], inputs["vae"]) == ("auto", ["1", 2])
    assert browser("line", until="Fits")["mood"] == "good"
    assert "assumed" not in browser("details", until="Fits")["text"]
    browser("key", keys="Escape")


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_a_decode_and_create_video_become_one(browser, comfy, shots, renderer, host_places):
    """Decode to Video takes the place of both, with rate, depth and links; it plans and runs, and can be undone."""
    path = tiny_wan(comfy, host_places)
    opened(browser, comfy, renderer)
    loaded = graph(path.name)
    loaded["nodes"][3] |= {
        "type": "CreateVideo", "widgets_values": [12, 10],
        "inputs": [{"name": "images", "type": "IMAGE", "link": 3}],
        "outputs": [{"name": "VIDEO", "type": "VIDEO", "links": [4]}],
    }  # fmt: skip
    loaded["nodes"].append({
        "id": 5, "type": "SaveVideo", "pos": [2000, 60], "size": [300, 120], "mode": 0, "order": 5, "flags": {},
        "properties": {}, "widgets_values": ["video/adopted", "auto", "auto"], "outputs": [],
        "inputs": [{"name": "video", "type": "VIDEO", "link": 4}],
    })  # fmt: skip
    loaded["links"].append([4, 4, 0, 5, 0, "VIDEO"])
    browser("load", workflow=loaded)
    before = browser("prompt")
    adopt(browser, "3", "Use Zero-Waste Decode to Video")
    after = browser("prompt")
    ((name, inputs),) = of(after, "ZeroWasteVAEDecodeToVideo").items()
    assert (inputs["samples"], inputs["vae"]) == (["2", 0], ["1", 0])
    assert (inputs["fps"], inputs["pixels"], inputs["tiling"]) == (12, "yuv420p10", "auto")
    assert after["5"]["inputs"]["video"] == [name, 0]
    assert before.keys() - after.keys() == {"3", "4"}
    undo_to(browser, before)
    adopt(browser, "3", "Use Zero-Waste Decode to Video")
    sheet = browser("details", until="Fits")
    assert "Frames go to the file as they are made" in sheet["text"]
    browser("key", keys="Escape")
    # What lies in the host's cache sends no result.
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)
    assert browser("run") == ["execution_success", None]
    assert "whole frames" in browser("line", until="/frame")["text"]
    # A comparison would hold all frames.
    assert "Compare" not in browser("details", until="/frame")["text"]
    browser("view", file=str(shots / f"adopt-video-{renderer}.png"))
    browser("key", keys="Escape")
    # Of our own decode, too.
    browser("load", workflow=loaded)
    adopt(browser, "3")
    ours = next(n["id"] for n in browser("nodes") if n["type"] == "ZeroWasteVAEDecode")
    browser("set", node=ours, widget="vram_gb", value=3)
    adopt(browser, ours, "Use Zero-Waste Decode to Video")
    ((_, inputs),) = of(browser("prompt"), "ZeroWasteVAEDecodeToVideo").items()
    assert (inputs["vram_gb"], inputs["fps"]) == (3, 12)


def test_tiles_of_a_network_that_stays_comfyuis_own_are_kept(browser, comfy):
    opened(browser, comfy)
    loaded = graph("not_a_vae.safetensors")
    loaded["nodes"][2] |= {"title": "My decode", "color": "#322", "mode": 4}
    browser("load", workflow=loaded)
    adopt(browser, "3")
    ours = "app.graph.nodes.find((n) => n.type === 'ZeroWasteVAEDecode')"
    assert browser("js", source=f"[{ours}.title, {ours}.color, {ours}.mode]") == ["My decode", "#322", 4]
    browser("js", source=f"void ({ours}.mode = 0)")
    ((_, inputs),) = of(browser("prompt"), "ZeroWasteVAEDecode").items()
    assert (inputs["tiling"], inputs["tiling.tile"], inputs["tiling.overlap"]) == ("blended", 384, 96)


def test_a_loader_gets_optimize_behind_it(browser, comfy, shots):
    opened(browser, comfy)
    browser("load", workflow=graph("tiny.safetensors", "VAEDecode", ()))
    browser("menu", node="1", entry=ENTRY)
    prompt = browser("prompt")
    ((name, inputs),) = of(prompt, "ZeroWasteVAEOptimize").items()
    assert inputs["vae"] == ["1", 0]
    assert prompt["3"]["inputs"]["vae"] == [name, 0]
    assert prompt["1"]["inputs"]["vae_name"] == "tiny.safetensors"
    browser("view", file=str(shots / "adopt-loader.png"))
    # There is nothing left to do for it.
    assert ENTRY not in browser("menu", node="1")


def test_a_replaced_decode_runs_and_is_compared(browser, comfy, shots, host_places):
    """With a VAE of the host's own; the comparison really runs the host's decode of the same latent."""
    path = tiny_wan(comfy, host_places)
    opened(browser, comfy)
    browser("load", workflow=graph(path.name))
    adopt(browser, "3")
    assert browser("run") == ["execution_success", None]
    browser("line", until="/frame")
    # What changes after the run (seeds do by themselves) is not what is compared.
    browser("set", node="2", widget="length", value=9)
    browser("line", until="Fits")
    browser("details", until="Fits")
    browser("js", source="document.querySelector('[data-zerowaste=compare]').click()")
    shown = "[...document.querySelectorAll('.zerowaste-compare .zerowaste-pictures img')].map((e) => e.naturalWidth)"
    for _ in range(200):
        widths = browser("js", source=shown)
        if len(widths) == 2 and all(widths):
            break
        time.sleep(0.3)
    text = browser("js", source="document.querySelector('.zerowaste-compare').innerText")
    assert len(widths) == 2 and all(widths), text
    assert "The frames: equal" in text
    assert "Seams: none possible" in text and "(5 compared)" in text
    browser("view", file=str(shots / "compare.png"))
    browser("key", keys="Escape")


def test_a_wider_node_covers_no_neighbour(browser, comfy):
    """A decode with its preview close beside it and a node below: both make room, and undo puts them back."""
    opened(browser, comfy)
    loaded = graph("tiny.safetensors", "VAEDecode", ())
    loaded["nodes"][2] |= {"size": [210, 46], "pos": [1200, 60]}
    loaded["nodes"][3] |= {"pos": [1440, 60]}
    loaded["nodes"].append(loaded["nodes"][1] | {"id": 5, "pos": [1200, 150], "outputs": []})
    browser("load", workflow=loaded)
    before = {n["id"]: n["pos"] for n in browser("nodes")}
    adopt(browser, "3")
    nodes = browser("nodes")
    ours = next(n for n in nodes if n["type"] == "ZeroWasteVAEDecode")
    x, y, w, h = *ours["pos"], *ours["size"]
    for other in nodes:
        x2, y2, w2, h2 = *other["pos"], *other["size"]
        assert other is ours or x + w <= x2 or x2 + w2 <= x or y + h <= y2 - 30 or y2 + h2 <= y - 30, other["type"]
    browser("key", keys="Control+z")
    time.sleep(1)
    assert {n["id"]: n["pos"] for n in browser("nodes")} == before


def test_what_the_whole_workflow_keeps_is_named(browser, comfy):
    """Encode for Inpainting grows its mask, too: it stays, and gets its VAE through Optimize."""
    opened(browser, comfy)
    loaded = graph("tiny.safetensors", "VAEDecode", ())
    inputs = [{"name": "vae", "type": "VAE", "link": 4}]
    loaded["nodes"].append(loaded["nodes"][2] | {"id": 5, "type": "VAEEncodeForInpaint", "widgets_values": [6],
                                                 "pos": [1200, 400], "inputs": inputs, "outputs": []})  # fmt: skip
    loaded["links"].append([4, 1, 0, 5, 0, "VAE"])
    browser("load", workflow=loaded)
    browser("js", source="app.extensionManager.command.execute('ZeroWasteVAE.UseEverywhere').then(() => 1)")
    for _ in range(50):
        text = browser("js", source="document.body.innerText")
        if "Left as they are" in text:
            break
        time.sleep(0.2)
    assert "Nodes replaced: 1." in text or "Nodes replaced: 2." in text
    assert "Left as they are: VAE Encode (for Inpainting)." in text
    kinds = {kind for _, kind in nodes_anywhere(browser)}
    assert {"VAEEncodeForInpaint", "ZeroWasteVAEDecode"} <= kinds and "VAEDecode" not in kinds


def test_nodes_of_others_have_no_such_entry(browser, comfy):
    opened(browser, comfy)
    browser("load", workflow=graph("tiny.safetensors"))
    assert ENTRY not in browser("menu", node="4")
