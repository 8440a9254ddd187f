"""Every edge between the states of a status line, in the browser; docs/comfyui.md has their table."""

from __future__ import annotations

import json
import re
import time

import pytest
import running
from pages import ROOT, opened
from test_adopt import graph

pytestmark = pytest.mark.host

RENDERERS = ["canvas", "vue"]
STATES = re.findall(r'^  \["(\w+)", ', (ROOT / "web" / "js" / "states.js").read_text(), re.MULTILINE)
NODE = "app.graph.nodes.find((n) => String(n.id) === '{}')"
#: Of the latent, Optimize and decode below.
LATENT, BETWEEN, DECODE, LOADER, OTHER = (NODE.format(number) for number in (2, 5, 3, 1, 6))


def lines(vae: str = "tiny.safetensors") -> dict:
    """Loader, an empty latent, a node that repeats it once, and a decode; a second loader beside them."""
    loaded = graph(vae, "ZeroWasteVAEDecode", ())
    loader, latent, decode, _ = loaded["nodes"]
    loader |= {"type": "ZeroWasteVAELoader", "widgets_values": [vae, "auto", 0, 0, True]}
    loaded["nodes"].append(latent | {
        "id": 5, "type": "RepeatLatentBatch", "pos": [800, 400], "widgets_values": [1],
        "inputs": [{"name": "samples", "type": "LATENT", "link": 2}],
        "outputs": [{"name": "LATENT", "type": "LATENT", "links": [4]}],
    })  # fmt: skip
    other = loader | {"id": 6, "pos": [400, 700], "outputs": [{"name": "VAE", "type": "VAE", "links": []}]}
    loaded["nodes"].append(other)
    decode["inputs"][0]["link"] = 4
    loaded["links"][1] = [2, 2, 0, 5, 0, "LATENT"]
    loaded["links"].append([4, 5, 0, 3, 0, "LATENT"])
    return loaded


def put(node: str, widget: str, value: object) -> str:
    held = f"{node}.widgets.find((w) => w.name === '{widget}')"
    return f"void (({held}.value = {json.dumps(value)}), {held}.callback?.({json.dumps(value)}))"


#: What changes -> (how, how it is taken back, the state that follows).
CHANGES = {
    "a widget of the node": (put(DECODE, "vram_gb", 0.01), put(DECODE, "vram_gb", 0), "refused"),
    "its tiling": (put(DECODE, "tiling", "untiled"), put(DECODE, "tiling", "auto"), "planned"),
    "a draft, which its family has none of": (put(DECODE, "draft", True), put(DECODE, "draft", False), "refused"),
    "the precision": (put(LOADER, "precision", "fp16"), put(LOADER, "precision", "auto"), "planned"),
    "the file": (put(LOADER, "vae_name", "not_a_vae.safetensors"), put(LOADER, "vae_name", "tiny.safetensors"),
                 "foreign"),
    "the size": (put(LATENT, "width", 128), put(LATENT, "width", 64), "planned"),
    "a node before it": (put(BETWEEN, "amount", 2), put(BETWEEN, "amount", 1), "planned"),
    "a node before it is bypassed": (f"void ({BETWEEN}.mode = 4)", f"void ({BETWEEN}.mode = 0)", "planned"),
    "the latent's link": (f"void {DECODE}.disconnectInput(0)", f"void {BETWEEN}.connect(0, {DECODE}, 0)", "unknown"),
    "the VAE's loader": (f"void {OTHER}.connect(0, {DECODE}, 1)", f"void {LOADER}.connect(0, {DECODE}, 1)", "planned"),
    "frames beyond memory": (put(LATENT, "length", 99_997) + ", " + put(LATENT, "width", 4096),
                             put(LATENT, "length", 5) + ", " + put(LATENT, "width", 64), "refused"),
}  # fmt: skip


def state(browser) -> list[str]:
    """[state, colour of the dot, text] of the only line."""
    found = browser("js", source="[...document.querySelectorAll('[data-zerowaste=status]')]"
                                 ".map((e) => [e.dataset.state, e.dataset.mood, e.innerText])")  # fmt: skip
    assert len(found) == 1
    return found[0]


def until(browser, *names: str) -> list[str]:
    """The line, once it is in one of these states; fails after 60 s."""
    for _ in range(300):
        found = state(browser)
        if found[0] in names:
            return found
        time.sleep(0.2)
    pytest.fail(f"{found} instead of {names}")


def fresh(server) -> None:
    server.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)


def ran(browser, server) -> None:
    fresh(server)
    assert browser("run") == ["execution_success", None]
    until(browser, "ran")


def test_the_table_has_every_state():
    table = (ROOT / "docs" / "comfyui.md").read_text().partition("## The status line")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:] == STATES


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_result_counts_until_something_changes(browser, comfy, renderer):
    """And again once that is taken back. Never is the line green by the old result."""
    opened(browser, comfy, renderer)
    browser("load", workflow=lines())
    until(browser, "planned")
    ran(browser, comfy)
    shown = state(browser)
    found = {}
    for name, (change, back, _) in CHANGES.items():
        browser("js", source=change)
        found[name] = until(browser, "planned", "refused", "unknown", "foreign")[0]
        browser("js", source=back)
        assert until(browser, "ran") == shown, name
    assert found == {name: expected for name, (_, _, expected) in CHANGES.items()}
    # What changes by itself after every run, and texts for a model, change no size.
    browser("js", source=put(LATENT, "length", 9))
    until(browser, "planned")


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_frames_beyond_memory(browser, comfy, shots, renderer, language):
    """Red before the run, with the way out, and the run's error has the words of the sheet."""
    opened(browser, comfy, renderer, language=language)
    loaded = lines()
    loaded["nodes"][1]["widgets_values"] = [2048, 2048, 8001, 1]
    browser("load", workflow=loaded)
    _, mood, text = until(browser, "refused")
    words = {"en": "Frames take 375.", "zh": "帧占用 375."}[language]
    assert mood == "bad" and text.startswith(words)
    sheet = browser("details", until=words)["text"]
    why = {
        "en": r"8001 frames take 375\.\d+ GB of host memory and .* are free: use Zero-Waste Decode to Video, which "
              "writes them to a file as they are made",
        "zh": r"8001 帧占用 375\.\d+ GB 内存，而空闲 .*：请用 Zero-Waste 解码为视频，它边解码边写入文件",
    }[language]  # fmt: skip
    assert re.search(why, sheet.replace("\n", " "))
    browser("view", file=str(shots / f"crowded-{renderer}-{language}.png"))
    browser("key", keys="Escape")


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_failed_load_is_said_where_it_is_missed(browser, comfy, renderer):
    """Loading fails in the loader; the decode behind it has no result either, until something changes."""
    whole = (comfy.base / "models" / "vae" / "tiny.safetensors").read_bytes()
    (comfy.base / "models" / "vae" / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    comfy.get("/object_info/ZeroWasteVAELoader")  # lists the files
    opened(browser, comfy, renderer)
    browser("load", workflow=lines())
    ran(browser, comfy)
    browser("js", source="app.refreshComboInNodes().then(() => 1)")
    browser("js", source=put(LOADER, "vae_name", "cut.safetensors"))
    assert until(browser, "unknown")[1] == "quiet"
    assert browser("run")[0] == "execution_error"
    browser("key", keys="Escape")
    _, mood, text = until(browser, "failed")
    assert mood == "bad" and "cut.safetensors" in text
    browser("js", source=put(LOADER, "precision", "fp16"))
    until(browser, "unknown")
    # What the server does not even queue.
    browser("js", source=put(LOADER, "vae_name", "gone.safetensors"))
    browser("js", source="app.queuePrompt(0, 1).then(() => 1, () => 1)")
    _, mood, text = until(browser, "failed")
    assert mood == "bad" and "gone.safetensors" in text
    browser("key", keys="Escape")
    browser("problems", forget=True)  # the page's own words of it
    browser("js", source=put(LOADER, "vae_name", "tiny.safetensors"))
    until(browser, "planned")


@pytest.mark.parametrize("renderer", RENDERERS)
def test_an_error_of_no_node_and_a_node_that_is_gone(browser, comfy, renderer):
    opened(browser, comfy, renderer)
    browser("load", workflow=lines())
    until(browser, "planned")
    event = """void app.api.dispatchEvent(new CustomEvent('execution_error', { detail:
      { prompt_id: 'unknown', node_id: %s, exception_message: 'no', exception_type: 'x' } }))"""
    for node in ("null", "'99'", "'66:5'"):
        browser("js", source=event % node)
    assert until(browser, "planned")[1] == "good"
    browser("js", source=event % "'5'")  # the node before it
    assert until(browser, "failed")[2] == "Stopped: no"


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_server_that_dies_and_comes_back(browser, tmp_path_factory, renderer):
    """It says so at once; what ran never ends, and what it then says is the new server's."""
    places = running.newest()
    with running.serving(tmp_path_factory.mktemp("mortal"), places, device=running.page()) as server:
        opened(browser, server, renderer)
        loaded = lines()
        browser("load", workflow=loaded)
        ran(browser, server)
        loaded["nodes"][1]["widgets_values"] = [256, 192, 65, 1]
        browser("load", workflow=loaded)
        browser("js", source="void app.queuePrompt(0, 1)")
        assert until(browser, "running")[1] == "busy"
        server.die()
        assert until(browser, "away")[1:] == ["quiet", "ComfyUI's server does not answer"]
        browser("js", source=put(LATENT, "width", 128))
        time.sleep(1)
        assert state(browser)[0] == "away"
        server.start()
        assert until(browser, "planned")[1] == "good"
        browser("problems", forget=True)  # of requests that nobody answered
        # The next run's result is one again.
        browser("js", source=put(LATENT, "length", 5))
        ran(browser, server)
        browser("js", source="void app.api.socket.close()")  # and a hiccup of the connection
        until(browser, "planned")


@pytest.mark.parametrize("renderer", RENDERERS)
def test_nodes_without_plans_say_when_their_result_is_old(browser, comfy, renderer):
    opened(browser, comfy, renderer)
    place = {"id": 1, "type": "ZeroWasteVAEDemoClip", "pos": [40, 60], "size": [300, 60], "mode": 0, "order": 0,
             "flags": {}, "properties": {}, "widgets_values": [1], "inputs": [],
             "outputs": [{"name": "IMAGE", "type": "IMAGE", "links": [1]}]}  # fmt: skip
    loader = lines()["nodes"][0] | {"id": 2, "pos": [40, 300]}
    loader["outputs"] = [{"name": "VAE", "type": "VAE", "links": [2]}]
    encode = {"id": 3, "type": "ZeroWasteVAEEncode", "pos": [500, 60], "size": [300, 60], "mode": 0, "order": 2,
              "flags": {}, "properties": {}, "widgets_values": [],
              "inputs": [{"name": "pixels", "type": "IMAGE", "link": 1}, {"name": "vae", "type": "VAE", "link": 2}],
              "outputs": [{"name": "LATENT", "type": "LATENT", "links": [3]}]}  # fmt: skip
    save = encode | {"id": 4, "type": "SaveLatent", "pos": [1000, 60], "widgets_values": ["latents/old"], "outputs": []}
    save["inputs"] = [{"name": "samples", "type": "LATENT", "link": 3}]
    links = [[1, 1, 0, 3, 0, "IMAGE"], [2, 2, 0, 3, 1, "VAE"], [3, 3, 0, 4, 0, "LATENT"]]
    browser("load", workflow={"nodes": [place, loader, encode, save], "links": links, "version": 0.4,
                              "last_node_id": 9, "last_link_id": 9})  # fmt: skip
    assert until(browser, "new")[1:] == ["quiet", "Not run yet"]
    ran(browser, comfy)
    browser("js", source=put(NODE.format(1), "frames", 5))
    assert until(browser, "changed")[1:] == ["quiet", "Changed since the last run"]
    browser("js", source=put(NODE.format(1), "frames", 1))
    until(browser, "ran")
