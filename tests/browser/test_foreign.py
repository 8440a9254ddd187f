"""Use Zero-Waste VAE on nodes of other packs: behind their loaders, from the nodes that use their VAE, in the place of
LTXVideo's decodes in tiles and of KJNodes' patch. The packs are stand-ins (tests/host/other_packs)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import running
from adopting import ENTRY, EVERYWHERE, nodes_anywhere, of, undo_to, until_kinds
from pages import opened

pytestmark = pytest.mark.host
PACKS = Path(__file__).resolve().parents[1] / "host" / "other_packs"
WAN, SEEDVR2 = "ZeroWasteVAEForWanVideo", "ZeroWasteVAEForSeedVR2"
RENDERERS = pytest.mark.parametrize("renderer", ["canvas", "vue"])


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    others = [PACKS / name for name in ("wan_video", "seedvr2", "single_nodes")]
    base = tmp_path_factory.mktemp("foreign")
    with running.serving(base, running.newest(), others=others, device=running.page()) as server:
        yield server


class Graph:
    """A workflow in a row, as saved."""

    def __init__(self) -> None:
        self.nodes, self.links = [], []

    def add(self, kind: str, values: list, outputs: str, **inputs: tuple) -> int:
        """Add a node; outputs: types; inputs: name=(number, slot, type)."""
        number = len(self.nodes) + 1
        slots = []
        for name, (source, slot, of_type) in inputs.items():
            self.links.append([len(self.links) + 1, source, slot, number, len(slots), of_type])
            self.nodes[source - 1]["outputs"][slot]["links"].append(len(self.links))
            slots.append({"name": name, "type": of_type, "link": len(self.links)})
        self.nodes.append({
            "id": number, "type": kind, "pos": [380 * number - 300, 100], "size": [300, 200], "mode": 0, "flags": {},
            "order": number, "properties": {}, "widgets_values": values, "inputs": slots,
            "outputs": [{"name": name, "type": name, "links": []} for name in outputs.split()],
        })  # fmt: skip
        return number

    def saved(self) -> dict:
        return {"nodes": self.nodes, "links": self.links, "version": 0.4, "last_node_id": len(self.nodes),
                "last_link_id": len(self.links), "groups": [], "extra": {}}  # fmt: skip


def wan_graph(multi: str = "") -> Graph:
    """Loader 1, latent 2, decode 3, preview 4, encode 5."""
    g = Graph()
    g.add(f"WanVideoVAELoader{multi}", ["small", "fp32"], "WANVAE MULTIGPUDEVICE" if multi else "WANVAE")
    g.add("EmptyHunyuanLatentVideo", [48, 32, 5, 1], "LATENT")
    g.add(f"WanVideoDecode{multi}", [True, 272, 272, 144, 128], "IMAGE", vae=(1, 0, "WANVAE"), samples=(2, 0, "LATENT"))
    g.add("PreviewImage", [], "", images=(3, 0, "IMAGE"))
    if not multi:
        g.add("WanVideoEncode", [False], "LATENT", vae=(1, 0, "WANVAE"), image=(3, 0, "IMAGE"))
        g.add("SaveLatent", ["z"], "", samples=(5, 0, "LATENT"))
    return g


def upscale_graph() -> Graph:
    g = Graph()
    g.add("SeedVR2LoadVAEModel", ["tiny.safetensors", "cpu", False, False, True], "SEEDVR2_VAE")
    g.add("EmptyImage", [48, 32, 5, 0], "IMAGE")
    g.add("SeedVR2VideoUpscaler", [5, "never"], "IMAGE", image=(2, 0, "IMAGE"), vae=(1, 0, "SEEDVR2_VAE"))
    g.add("PreviewImage", [], "", images=(3, 0, "IMAGE"))
    return g


def kinds(graph: Graph, *more: str) -> list[str]:
    return [n["type"] for n in graph.nodes] + list(more)


@RENDERERS
@pytest.mark.parametrize("clicked", ["1", "3", "5"], ids=["loader", "decode", "encode"])
def test_wans_loader_gets_our_node_behind_it(browser, host, shots, renderer, clicked):
    """From it, or from the nodes that use its VAE, whose links all move; one step back; and it runs."""
    opened(browser, host, renderer)
    graph = wan_graph()
    browser("load", workflow=graph.saved())
    before = browser("prompt")
    browser("menu", node=clicked, entry=ENTRY)
    until_kinds(browser, kinds(graph, WAN))
    after = browser("prompt")
    ((name, inputs),) = of(after, WAN).items()
    assert inputs["vae"] == ["1", 0] and (inputs["precision"], inputs["vram_gb"]) == ("auto", 0)
    assert after["3"]["inputs"]["vae"] == [name, 0] and after["5"]["inputs"]["vae"] == [name, 0]
    undo_to(browser, before)
    browser("menu", node=clicked, entry=ENTRY)
    until_kinds(browser, kinds(graph, WAN))
    assert ENTRY not in browser("menu", node="3")  # nothing is left to do
    browser("key", keys="Escape")
    if clicked == "1":
        assert browser("run") == ["execution_success", None]
        browser("view", file=str(shots / f"foreign-wan-{renderer}.png"))


@pytest.mark.parametrize("clicked", ["1", "3"], ids=["loader", "upscaler"])
def test_the_upscalers_loader_gets_our_node_behind_it(browser, host, shots, clicked):
    opened(browser, host)
    graph = upscale_graph()
    browser("load", workflow=graph.saved())
    before = browser("prompt")
    browser("menu", node=clicked, entry=ENTRY)
    until_kinds(browser, kinds(graph, SEEDVR2))
    after = browser("prompt")
    ((name, inputs),) = of(after, SEEDVR2).items()
    assert inputs["vae"] == ["1", 0] and after["3"]["inputs"]["vae"] == [name, 0]
    assert after["1"] == before["1"]  # its tiles stay as they are
    undo_to(browser, before)
    browser("menu", node=clicked, entry=ENTRY)
    until_kinds(browser, kinds(graph, SEEDVR2))
    assert browser("run") == ["execution_success", None]
    browser("view", file=str(shots / "foreign-seedvr2.png"))


def test_multigpus_loader_keeps_its_device_output(browser, host):
    opened(browser, host)
    graph = wan_graph("MultiGPU")
    browser("load", workflow=graph.saved())
    before = browser("prompt")
    browser("menu", node="3", entry=ENTRY)
    until_kinds(browser, kinds(graph, WAN))
    ((name, inputs),) = of(browser("prompt"), WAN).items()
    assert inputs["vae"] == ["1", 0] and browser("prompt")["3"]["inputs"]["vae"] == [name, 0]
    undo_to(browser, before)


def test_a_loader_of_small_decoders_says_why_not(browser, host):
    opened(browser, host)
    graph = Graph()
    graph.add("WanVideoTinyVAELoader", ["small"], "WANVAE")
    browser("load", workflow=graph.saved())
    (entry,) = (text for text in browser("menu", node="1") if ENTRY in text)
    assert "not for small decoders" in entry
    browser("key", keys="Escape")
    browser("js", source=EVERYWHERE)
    time.sleep(1)
    assert "a VAE type of their own (WANVAE)" in browser("js", source="document.body.innerText")
    assert nodes_anywhere(browser) == [("1", "WanVideoTinyVAELoader")]


def test_the_command_takes_all_of_them_in_one_step(browser, host):
    opened(browser, host)
    graph, other = wan_graph(), upscale_graph()
    shift = len(graph.nodes)
    for link in other.links:
        graph.links.append([link[0] + 100, link[1] + shift, link[2], link[3] + shift, *link[4:]])
    for one in other.nodes:
        for end in one["inputs"]:
            end["link"] += 100
        for end in one["outputs"]:
            end["links"] = [number + 100 for number in end["links"]]
        graph.nodes.append({**one, "id": one["id"] + shift, "pos": [one["pos"][0], 500]})
    saved = graph.saved() | {"last_link_id": 200}
    browser("load", workflow=saved)
    before = browser("prompt")
    browser("js", source=EVERYWHERE)
    until_kinds(browser, kinds(graph, WAN, SEEDVR2))
    assert "Nodes replaced: 2. Undo brings them back." in browser("js", source="document.body.innerText")
    undo_to(browser, before)


def ltx_graph(kind: str, values: list, file: str = "tiny.safetensors") -> Graph:
    g = Graph()
    g.add("VAELoaderMultiGPU", [file, "cpu"], "VAE")
    g.add("EmptyHunyuanLatentVideo", [48, 32, 5, 1], "LATENT")
    g.add(kind, values, "IMAGE", vae=(1, 0, "VAE"), latents=(2, 0, "LATENT"))
    g.add("PreviewImage", [], "", images=(3, 0, "IMAGE"))
    return g


@pytest.mark.parametrize(("kind", "count"), [("LTXVTiledVAEDecode", 3), ("LTXVSpatioTemporalTiledVAEDecode", 4)])
def test_ltxvideos_decodes_in_tiles_become_ours(browser, host, kind, count):
    """Whole frames, so its tiles are not missed; not where the last frame is made from a repeated latent."""
    opened(browser, host)
    graph = ltx_graph(kind, [*[2] * count, False, "auto", "auto"])
    browser("load", workflow=graph.saved())
    before = browser("prompt")
    browser("menu", node="3", entry=ENTRY)
    until_kinds(browser, ["ZeroWasteVAEDecode" if k == kind else k for k in kinds(graph)])
    ((_, inputs),) = of(browser("prompt"), "ZeroWasteVAEDecode").items()
    assert (inputs["samples"], inputs["vae"], inputs["tiling"]) == (["2", 0], ["1", 0], "auto")
    assert "Not carried over" not in browser("js", source="document.body.innerText")
    undo_to(browser, before)
    browser("load", workflow=ltx_graph(kind, [*[2] * count, True, "auto", "auto"]).saved())
    assert ENTRY not in browser("menu", node="3")
    browser("key", keys="Escape")


def test_multigpus_loader_of_comfyuis_vae_gets_optimize(browser, host):
    opened(browser, host)
    graph = ltx_graph("VAEDecode", [])
    graph.nodes[2]["inputs"][1]["name"] = "samples"
    browser("load", workflow=graph.saved())
    browser("menu", node="1", entry=ENTRY)
    until_kinds(browser, kinds(graph, "ZeroWasteVAEOptimize"))


@pytest.mark.parametrize("eight", [True, False])
def test_a_patch_of_kjnodes_gives_way_to_optimize(browser, host, eight):
    opened(browser, host)
    graph = Graph()
    graph.add("VAELoader", ["tiny.safetensors"], "VAE")
    graph.add("PatchTritonVAE", [True, True, eight, False], "VAE", vae=(1, 0, "VAE"))
    graph.add("EmptyHunyuanLatentVideo", [48, 32, 5, 1], "LATENT")
    graph.add("VAEDecode", [], "IMAGE", samples=(3, 0, "LATENT"), vae=(2, 0, "VAE"))
    graph.add("PreviewImage", [], "", images=(4, 0, "IMAGE"))
    browser("load", workflow=graph.saved())
    before = browser("prompt")
    browser("menu", node="2", entry=ENTRY)
    until_kinds(browser, ["ZeroWasteVAEOptimize" if k == "PatchTritonVAE" else k for k in kinds(graph)])
    ((name, inputs),) = of(browser("prompt"), "ZeroWasteVAEOptimize").items()
    assert inputs["vae"] == ["1", 0] and inputs["precision"] == ("int8" if eight else "auto")
    assert browser("prompt")["4"]["inputs"]["vae"] == [name, 0]
    undo_to(browser, before)
