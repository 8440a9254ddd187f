"""Use Zero-Waste VAE on the templates that the host's own package offers: one action, with links, values and undo."""

from __future__ import annotations

import json
import time

import pytest
from adopting import ENTRY, EVERYWHERE, INTO_SUBGRAPH, adopt, of, undo_to
from pages import opened

pytestmark = pytest.mark.host

#: What the server plans for each of our decodes, in subgraphs too; null where there is nothing to ask.
PLANS = """(async () => {
  const load = (name) => import(`/extensions/ComfyUI-ZeroWasteVAE/js/${name}.js`);
  const [{ question }, { planFor }, { allNodes }] = await Promise.all(["question", "plans", "graph"].map(load));
  const found = [];
  for (const node of allNodes().filter((one) => one.comfyClass === "ZeroWasteVAEDecode")) {
    const { query } = question(node);
    while (query && planFor(query) === undefined) await new Promise((done) => setTimeout(done, 100));
    found.push(query ? planFor(query).plan : null);
  }
  return found;
})()"""


def template(host_places, name: str) -> dict:
    """One of the templates that the host's own package offers."""
    _, venv = host_places
    found = [*venv.glob(f"lib/*/site-packages/comfyui_workflow_templates_json/templates/{name}.json")]
    if not found:
        pytest.skip(f"this host brings no template {name}")
    return json.loads(found[0].read_text())


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
    undo_to(browser, before)


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_one_action_in_cores_seedvr2_template(browser, comfy, shots, renderer, host_places):
    """Its nodes are in a subgraph, and its decode is tiled: whole frames take the place of its tiles."""
    opened(browser, comfy, renderer)
    browser("load", workflow=template(host_places, "utility_seedvr2_3b_int8_upscale_video"))
    before = browser("prompt")
    browser("js", source=INTO_SUBGRAPH)
    adopt(browser, "55")
    after = browser("prompt")
    ((name, inputs),) = of(after, "ZeroWasteVAEDecode").items()
    assert (inputs["samples"], inputs["vae"], inputs["tiling"]) == (["66:103", 0], ["66:51", 0], "auto")
    assert after["66:59"]["inputs"]["images"] == [name, 0]
    assert before.keys() - after.keys() == {"66:55"}
    browser("line", until="known after a run")
    browser("view", file=str(shots / f"adopt-seedvr2-{renderer}.png"))
    undo_to(browser, before)
    # The whole workflow, from outside: one command, one step of undo.
    browser("js", source="app.canvas.setGraph(app.rootGraph)")
    browser("js", source=EVERYWHERE)
    after = browser("prompt")
    assert not of(after, "VAEDecodeTiled") and not of(after, "VAEEncodeTiled")
    (encode,) = of(after, "ZeroWasteVAEEncode").values()
    assert (encode["pixels"], encode["vae"]) == (["66:58", 0], ["66:51", 0])
    assert len(of(after, "ZeroWasteVAEDecode")) == 1
    undo_to(browser, before)


@pytest.mark.parametrize(
    ("name", "vae", "clip"),
    [
        ("flux_dev_full_text_to_image", "Flux", (1024, 1024, 1)),
        ("sdxl_simple_example", "Stable Diffusion", (1024, 1024, 1)),
        ("hunyuan_video_text_to_video", "HunyuanVideo", (848, 480, 73)),
        ("video_hunyuan_video_1.5_720p_t2v", "HunyuanVideo 1.5", (1280, 720, 121)),
        ("ltxv_text_to_video", "LTX-2.3", (768, 512, 97)),
        ("image_qwen_image", "Wan 2.1", (1328, 1328, 1)),
    ],
)
def test_one_command_in_cores_templates_of_every_family(browser, comfy, host_places, name, vae, clip):
    """Nothing is left to replace, tiles that the engine does not need are gone, and each is planned as what it is."""
    opened(browser, comfy)
    browser("load", workflow=template(host_places, name))
    before = browser("prompt")
    browser("js", source=EVERYWHERE)
    after = browser("prompt")
    kinds = {n["class_type"] for n in after.values()}
    assert not kinds & {"VAEDecode", "VAEDecodeTiled", "VAEEncode", "VAEEncodeTiled"}
    assert all(inputs["tiling"] == "auto" for inputs in of(after, "ZeroWasteVAEDecode").values())
    gone = {key: n["class_type"] for key, n in before.items() if key not in after}
    assert gone and all(kind.startswith(("VAEDecode", "VAEEncode")) for kind in gone.values())
    plan = browser("js", source=PLANS)[0]
    # What stands for the file that is not here, and its sizes.
    assert plan["assumed_as"] == vae
    assert (plan["width"], plan["height"], plan["frames"]) == clip


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_promoted_widgets_of_a_subgraph_are_followed(browser, comfy, shots, renderer, host_places):
    """Core's Qwen-Image template: width and height are widgets of the node that stands for the subgraph."""
    opened(browser, comfy, renderer)
    browser("load", workflow=template(host_places, "image_qwen_image"))
    browser("js", source=EVERYWHERE)
    outer = "app.rootGraph.nodes.find((n) => n.subgraph)"
    browser("js", source=INTO_SUBGRAPH)
    browser("line", until="Fits")
    sheet = browser("details", until="Fits")
    assert "1328 × 1328 px, 1 frame (from the nodes before)" in sheet["text"]
    assert "Wan 2.1" in sheet["text"]  # whose network Qwen-Image's VAE is
    browser("key", keys="Escape")
    browser("js", source=f"{outer}.widgets.filter((w) => w.name === 'width').forEach((w) => {{ w.value = 640; }})")
    time.sleep(2)
    assert "640 × 1328 px" in browser("details", until="GB")["text"]
    browser("view", file=str(shots / f"adopt-qwen-{renderer}.png"))
    browser("key", keys="Escape")
