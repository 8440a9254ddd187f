"""The frontend beside other packs: their loaders and decodes have our menu entry, VAE types of their own a node."""

from __future__ import annotations

import pytest
import running
from adopting import ENTRY, EVERYWHERE, adopt, of, undo_to, until_kinds
from pages import opened
from test_adopt import graph

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    with running.crowded(tmp_path_factory.mktemp("crowded"), running.newest()) as server:
        yield server


def needing(server, pack: str) -> None:
    if pack not in server.others:
        pytest.skip(f"needs {pack} in COMFY_PACKS")


def test_a_loader_of_kjnodes_gets_optimize_behind_it(browser, crowded, shots):
    needing(crowded, "ComfyUI-KJNodes")
    opened(browser, crowded)
    loaded = graph("tiny_wan.safetensors", "VAEDecode", ())
    loaded["nodes"][0] |= {"type": "VAELoaderKJ", "widgets_values": ["tiny_wan.safetensors", "main_device", "fp32"]}
    browser("load", workflow=loaded)
    browser("menu", node="1", entry=ENTRY)
    prompt = browser("prompt")
    ((name, inputs),) = of(prompt, "ZeroWasteVAEOptimize").items()
    assert inputs["vae"] == ["1", 0] and prompt["3"]["inputs"]["vae"] == [name, 0]
    # Its decode as well: one command for the whole, and the plan is that of the loader's file.
    browser("js", source=EVERYWHERE)
    ((_, inputs),) = of(browser("prompt"), "ZeroWasteVAEDecode").items()
    assert inputs["vae"] == [name, 0]
    assert browser("line", until="Fits")["mood"] == "good"
    assert browser("run") == ["execution_success", None]
    assert "/frame" in browser("line", until="/frame")["text"]
    browser("view", file=str(shots / "packs-kjnodes.png"))


@pytest.mark.parametrize("kind", ["Decode", "Encode"])
def test_batched_nodes_of_videohelpersuite_are_replaced(browser, crowded, kind):
    needing(crowded, "ComfyUI-VideoHelperSuite")
    opened(browser, crowded)
    loaded = graph("tiny_wan.safetensors", f"VHS_VAE{kind}Batched")
    loaded["nodes"][2]["widgets_values"] = {"per_batch": 16}  # as that pack saves them
    if kind == "Encode":
        loaded["nodes"][1] |= {"type": "EmptyImage", "widgets_values": [64, 48, 5, 0]}
        loaded["nodes"][1]["outputs"] = [{"name": "IMAGE", "type": "IMAGE", "links": [2]}]
        loaded["nodes"][2]["inputs"][0] = {"name": "pixels", "type": "IMAGE", "link": 2}
        loaded["nodes"][2]["outputs"] = [{"name": "LATENT", "type": "LATENT", "links": [3]}]
        loaded["nodes"][3] |= {"type": "SaveLatent", "inputs": [{"name": "samples", "type": "LATENT", "link": 3}]}
        loaded["links"][1:] = [[2, 2, 0, 3, 0, "IMAGE"], [3, 3, 0, 4, 0, "LATENT"]]
    browser("load", workflow=loaded)
    before = browser("prompt")
    adopt(browser, "3")
    after = browser("prompt")
    ((name, inputs),) = of(after, f"ZeroWasteVAE{kind}").items()
    assert inputs["samples" if kind == "Decode" else "pixels"] == ["2", 0] and inputs["vae"] == ["1", 0]
    assert [name, 0] in after["4"]["inputs"].values()
    undo_to(browser, before)


def test_a_vae_type_of_its_own_gets_our_node_behind_its_loader(browser, crowded, shots):
    """WanVideoWrapper's own, in one step."""
    needing(crowded, "ComfyUI-WanVideoWrapper")
    opened(browser, crowded)

    def entry(number: int, kind: str, values: list, inputs: list, outputs: list) -> dict:
        return {
            "id": number, "type": kind, "pos": [400 * number, 60], "size": [300, 200], "mode": 0, "order": number,
            "flags": {}, "properties": {}, "widgets_values": values, "inputs": inputs, "outputs": outputs,
        }  # fmt: skip

    vae = {"name": "vae", "type": "WANVAE"}
    loader = entry(1, "WanVideoVAELoader", ["tiny_wan.safetensors", "bf16"], [], [vae | {"links": [1]}])
    decode = entry(2, "WanVideoDecode", [True, 272, 272, 144, 128], [vae | {"link": 1}], [])
    nodes = {"nodes": [loader, decode], "links": [[1, 1, 0, 2, 0, "WANVAE"]], "version": 0.4, "last_node_id": 2,
             "last_link_id": 1}  # fmt: skip
    assert all(n["known"] for n in browser("load", workflow=nodes))
    before = browser("prompt")
    browser("menu", node="1", entry=ENTRY)
    until_kinds(browser, ["WanVideoVAELoader", "WanVideoDecode", "ZeroWasteVAEForWanVideo"])
    after = browser("prompt")
    ((name, inputs),) = of(after, "ZeroWasteVAEForWanVideo").items()
    assert inputs["vae"] == ["1", 0] and after["2"]["inputs"]["vae"] == [name, 0]
    browser("view", file=str(shots / "packs-wanvideowrapper.png"))
    undo_to(browser, before)


@pytest.mark.parametrize("words", ["oom", "vram", "vae decode", "long video", "wan vae"])
def test_search_still_finds_ours(browser, crowded, shots, words):
    opened(browser, crowded)
    browser("load", workflow={"nodes": [], "links": [], "version": 0.4})
    found = browser("search", words=words)
    assert "Zero-Waste VAE Decode" in found
