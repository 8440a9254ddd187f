"""Use Zero-Waste VAE: one action on core's own templates, in subgraphs too, with links, values and undo."""

from __future__ import annotations

import json
import time

import pytest
import running
from pages import opened

pytestmark = pytest.mark.host

ENTRY = "Use Zero-Waste VAE"
EVERYWHERE = "app.extensionManager.command.execute('ZeroWasteVAE.UseEverywhere').then(() => 1)"
INTO_SUBGRAPH = """(async () => {
  app.canvas.setGraph([...app.rootGraph.subgraphs.values()][0]);
  await new Promise((done) => setTimeout(done, 1500));
})()"""


def template(host_places, name: str) -> dict:
    """One of the templates that the host's own package offers."""
    _, venv = host_places
    found = [*venv.glob(f"lib/*/site-packages/comfyui_workflow_templates_json/templates/{name}.json")]
    if not found:
        pytest.skip(f"this host brings no template {name}")
    return json.loads(found[0].read_text())


def of(prompt: dict, kind: str) -> dict:
    return {name: n["inputs"] for name, n in prompt.items() if n["class_type"] == kind}


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_one_action_in_cores_wan_template(browser, comfy, shots, renderer, host_places):
    opened(browser, comfy, renderer)
    browser("load", workflow=template(host_places, "text_to_video_wan"))
    before = browser("prompt")
    # The one action: a right click, and this entry.
    browser("menu", node="8", entry=ENTRY)
    after = browser("prompt")
    ((name, inputs),) = of(after, "ZeroWasteVAEDecode").items()
    assert not of(after, "VAEDecode")
    assert (inputs["samples"], inputs["vae"], inputs["tiling"]) == (["3", 0], ["39", 0], "auto")
    (video,) = of(after, "CreateVideo").values()
    assert video["images"] == [name, 0]
    rest = {key: value for key, value in after.items() if key not in (name, "49")}
    assert rest == {key: value for key, value in before.items() if key not in ("8", "49")}
    # It says at once whether Wan's decode fits, and stands on nobody.
    assert "GB" in browser("line", until="GB")["text"]
    nodes = {n["id"]: n for n in browser("nodes")}
    ours, below = nodes[name], nodes["49"]
    assert ours["pos"] == [1100, 40] and below["pos"][1] - 30 >= ours["pos"][1] + ours["size"][1]
    browser("view", file=str(shots / f"adopt-wan-{renderer}.png"))
    browser("key", keys="Control+z")
    assert browser("prompt") == before
    assert browser("problems") == []


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_one_action_in_cores_seedvr2_template(browser, comfy, shots, renderer, host_places):
    """Its nodes are in a subgraph, and its decode is tiled: whole frames take the place of its tiles."""
    opened(browser, comfy, renderer)
    browser("load", workflow=template(host_places, "utility_seedvr2_3b_int8_upscale_video"))
    before = browser("prompt")
    browser("js", source=INTO_SUBGRAPH)
    browser("menu", node="55", entry=ENTRY)
    after = browser("prompt")
    ((name, inputs),) = of(after, "ZeroWasteVAEDecode").items()
    assert (inputs["samples"], inputs["vae"], inputs["tiling"]) == (["66:103", 0], ["66:51", 0], "auto")
    assert after["66:59"]["inputs"]["images"] == [name, 0]
    assert before.keys() - after.keys() == {"66:55"}
    browser("line", until="after the first run")
    browser("view", file=str(shots / f"adopt-seedvr2-{renderer}.png"))
    browser("key", keys="Control+z")
    time.sleep(1)
    assert browser("prompt") == before
    # The whole workflow, from outside: one command, one step of undo.
    browser("js", source="app.canvas.setGraph(app.rootGraph)")
    browser("js", source=EVERYWHERE)
    after = browser("prompt")
    assert not of(after, "VAEDecodeTiled") and not of(after, "VAEEncodeTiled")
    (encode,) = of(after, "ZeroWasteVAEEncode").values()
    assert (encode["pixels"], encode["vae"]) == (["66:58", 0], ["66:51", 0])
    assert len(of(after, "ZeroWasteVAEDecode")) == 1
    browser("key", keys="Control+z")
    time.sleep(1)
    assert browser("prompt") == before
    assert browser("problems") == []


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


def test_tiles_of_a_network_that_stays_comfyuis_own_are_kept(browser, comfy):
    opened(browser, comfy)
    loaded = graph("ae.safetensors")
    loaded["nodes"][2] |= {"title": "My decode", "color": "#322", "mode": 4}
    browser("load", workflow=loaded)
    browser("menu", node="3", entry=ENTRY)
    ours = "app.graph.nodes.find((n) => n.type === 'ZeroWasteVAEDecode')"
    assert browser("js", source=f"[{ours}.title, {ours}.color, {ours}.mode]") == ["My decode", "#322", 4]
    browser("js", source=f"void ({ours}.mode = 0)")
    ((_, inputs),) = of(browser("prompt"), "ZeroWasteVAEDecode").items()
    assert (inputs["tiling"], inputs["tiling.tile"], inputs["tiling.overlap"]) == ("blended", 384, 96)
    assert browser("problems") == []


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
    assert browser("problems") == []


def test_a_replaced_decode_runs_and_is_compared(browser, comfy, shots, host_places):
    """With a VAE of the host's own; the comparison really runs the host's decode of the same latent."""
    path = comfy.base / "models" / "vae" / "tiny_wan.safetensors"
    running.write_tiny_wan(host_places, path)
    opened(browser, comfy)
    browser("load", workflow=graph(path.name))
    browser("menu", node="3", entry=ENTRY)
    assert browser("run") == ["execution_success", None]
    browser("line", until="ms per frame")
    browser("details", until="ms per frame")
    browser("js", source="document.querySelector('[data-zerowaste=compare]').click()")
    shown = "[...document.querySelectorAll('.zerowaste-compare .zerowaste-pictures img')].map((e) => e.naturalWidth)"
    for _ in range(200):
        widths = browser("js", source=shown)
        if len(widths) == 2 and all(widths):
            break
        time.sleep(0.3)
    text = browser("js", source="document.querySelector('.zerowaste-compare').innerText")
    assert len(widths) == 2 and all(widths), text
    assert "dB PSNR" in text or "equal" in text
    assert "Seams: none possible" in text
    browser("view", file=str(shots / "compare.png"))
    browser("key", keys="Escape")
    assert browser("problems") == []


def test_nodes_of_others_have_no_such_entry(browser, comfy):
    opened(browser, comfy)
    browser("load", workflow=graph("tiny.safetensors"))
    assert ENTRY not in browser("menu", node="4")
