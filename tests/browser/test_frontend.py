"""Workflows, widgets and status lines in the real frontend: drawn on the canvas and as elements, dark and light."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from pages import SAVED, node, opened, workflow
from zerowaste_vae.engine.options import TOGGLES

pytestmark = pytest.mark.host

LOOKS = [("canvas", "dark"), ("canvas", "light"), ("vue", "dark"), ("vue", "light")]


def luminance(colour: str) -> float:
    """0 (black) to 1 of an rgb(...) colour."""
    r, g, b = (float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def check_sheet(sheet: dict) -> None:
    """Nothing of what a click shows overlaps, is cut off or hard to read."""
    left, top, right, bottom = sheet["box"]
    assert 200 < right - left < 400
    assert left >= 0 and right <= 1900 and top >= 0 and bottom <= 1250
    assert not sheet["clipped"]
    for box in sheet["parts"]:
        assert box[0] >= left - 1 and box[2] <= right + 1
    rows = sorted((box for box in sheet["lines"] if box[3] > box[1]), key=lambda box: box[1])
    for above, below in pairwise(rows):
        assert below[1] >= above[3] - 1.5, "two lines overlap"
    assert abs(luminance(sheet["colour"]) - luminance(sheet["ground"])) > 0.4


@pytest.mark.parametrize(("renderer", "palette"), LOOKS)
def test_the_line_before_and_after_a_run(browser, comfy, shots, renderer, palette):
    opened(browser, comfy, renderer, palette)
    nodes = browser("load", workflow=workflow("Try it - demo clip"))
    decode = node(nodes, "ZeroWasteVAEDecode")
    line = browser("line", until="Fits:")
    assert line["text"].endswith("GB, whole frames, exact") and line["mood"] == "good"
    assert not line["cut"]
    # The theme's own font and colours.
    assert line["font"] == line["page"]
    assert abs(luminance(line["colour"]) - luminance(line["ground"])) > 0.3
    height = node(browser("nodes"), "ZeroWasteVAEDecode")["size"][1]
    before = browser("details", until="Fits:")
    assert "288 × 176 px, 1 frame (from the nodes before)" in before["text"]
    assert "assumed" not in before["text"]
    check_sheet(before)
    browser("view", file=str(shots / f"plan-{renderer}-{palette}.png"))
    browser("key", keys="Escape")
    assert browser("js", source="document.querySelectorAll('[data-zerowaste=details]').length") == 0
    # Another wish, another plan: tiles are drawn one by one.
    browser("set", node=decode["id"], widget="tiling", value="blended")
    browser("set", node=decode["id"], widget="tiling.tile", value=96)
    browser("set", node=decode["id"], widget="tiling.overlap", value=16)
    line = browser("line", until="blended tiles")
    assert "approximate" in line["text"] and not line["cut"]
    tiles = browser("details", until="blended tiles")
    assert tiles["tiles"] > 2
    assert f"{tiles['tiles']} blended tiles of 96 × 96 px" in tiles["text"]
    check_sheet(tiles)
    browser("view", file=str(shots / f"tiles-{renderer}-{palette}.png"))
    browser("key", keys="Escape")
    browser("set", node=decode["id"], widget="tiling", value="auto")
    # Nodes in the host's cache send no result to a page that was not there when they ran.
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)
    assert browser("run") == ["execution_success", None]
    after = browser("line", until="whole frames · exact")
    # One time, not several, and read to its end.
    assert after["text"].count("/frame · about") == 1 and not after["cut"]
    sheet = browser("details", until="whole frames · exact")
    assert "Last run" in sheet["text"] and "Compare with ComfyUI's own" in sheet["text"]
    # What this machine cannot do is no news.
    assert "no CUDA device" not in sheet["text"].partition("Last run")[2]
    assert "not in use" not in sheet["text"]
    check_sheet(sheet)
    browser("view", file=str(shots / f"result-{renderer}-{palette}.png"))
    browser("key", keys="Escape")
    # Neither plan nor result nor the sheet changed the node's height.
    assert node(browser("nodes"), "ZeroWasteVAEDecode")["size"][1] == pytest.approx(height, abs=2)


def test_results_stay_across_tabs(browser, comfy):
    opened(browser, comfy)
    browser("load", workflow=workflow("Try it - demo clip"))
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)
    assert browser("run") == ["execution_success", None]
    ran = browser("line", until="whole frames · exact")["text"]
    tabs = "app.extensionManager.workflow"
    first = browser("js", source=f"{tabs}.activeWorkflow.path")
    browser("load", workflow={"nodes": [], "links": [], "version": 0.4})
    assert browser("lines") == []
    back = "app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')"
    assert browser("js", source=f"{back}.then(() => {tabs}.activeWorkflow.path)") == first
    assert browser("line", until="whole frames · exact")["text"] == ran


def test_an_unconnected_node_asks_for_nothing_in_red(browser, comfy):
    opened(browser, comfy)
    browser("load", workflow={"nodes": [], "links": [], "version": 0.4})
    browser("js", source="void app.graph.add(LiteGraph.createNode('ZeroWasteVAEDecode'))")
    assert browser("line", until="Connect a latent")["mood"] == "quiet"
    time.sleep(1)
    assert browser("lines") == [["Connect a latent and a VAE", "quiet"]]


def test_a_wish_that_cannot_be_met_is_explained_before_the_run(browser, comfy):
    opened(browser, comfy)
    nodes = browser("load", workflow=workflow("Try it - demo clip"))
    decode = node(nodes, "ZeroWasteVAEDecode")["id"]
    browser("line", until="Fits:")
    browser("set", node=decode, widget="vram_gb", value=0.1)
    assert browser("line", until="Does not fit 0.10 GB")["mood"] == "bad"
    sheet = browser("details", until="Does not fit")
    assert "raise VRAM limit (vram_gb)" in sheet["text"]
    check_sheet(sheet)
    browser("key", keys="Escape")
    browser("set", node=decode, widget="vram_gb", value=0)
    browser("set", node=decode, widget="tiling", value="blended")
    browser("set", node=decode, widget="tiling.overlap", value=9000)
    assert "overlap=9000" in browser("line", until="overlap=9000")["text"]


def test_the_wan_template_is_planned_as_wan(browser, comfy):
    opened(browser, comfy)
    browser("load", workflow=workflow("Wan 2.1 - text to video"))
    browser("line", until="GB")
    assert "the published Wan 2.1 VAE is assumed" in browser("details", until="GB")["text"]
    browser("key", keys="Escape")


def test_many_nodes_ask_once_per_change(browser, comfy):
    """Sixty-four decodes with four different questions: four requests, one more for each that a change makes new, and
    the canvas goes on drawing while answers are on their way."""
    opened(browser, comfy)
    graph = workflow("Try it - demo clip")
    base = {n["type"]: n for n in graph["nodes"]}
    clip = base["ZeroWasteVAEDemoClip"]
    clip["widgets_values"] = [13]  # a size that no other test asks for
    nodes = [base["ZeroWasteVAELoader"], clip, base["ZeroWasteVAEEncode"]]
    links = [link for link in graph["links"] if link[3] == 3]
    for number in range(64):
        x, y = 900 + 420 * (number % 8), 60 + 260 * (number // 8)
        slots = [{"name": name, "type": kind, "link": 100 + 2 * number + i} for i, (name, kind) in enumerate(
            (("samples", "LATENT"), ("vae", "VAE")))]  # fmt: skip
        nodes.append({
            "id": 100 + number, "type": "ZeroWasteVAEDecode", "pos": [x, y], "size": [380, 200], "inputs": slots,
            "outputs": [], "widgets_values": [0, 1 + number % 4, "auto", "auto", 0], "mode": 0, "order": 9, "flags": {},
        })  # fmt: skip
        links += [[100 + 2 * number, 3, 0, 100 + number, 0, "LATENT"], [101 + 2 * number, 1, 0, 100 + number, 1, "VAE"]]
    for one in nodes:
        for index, slot in enumerate(one.get("outputs", [])):
            slot["links"] = [link[0] for link in links if (link[1], link[2]) == (one["id"], index)]
    hold = """(() => {
      window.__asked = [];
      const held = new Promise((done) => { window.__answer = done; });
      window.__fetch ??= app.api.fetchApi;
      app.api.fetchApi = async function (path, ...rest) {
        if (path.includes("/zerowaste_vae/plan")) {
          window.__asked.push(path);
          await held;
        }
        return window.__fetch.call(this, path, ...rest);
      };
    })()"""
    # Each draws the whole canvas; a page that waits for an answer would draw none.
    draw = """new Promise((done) => {
      let left = 5;
      const next = () => { app.canvas.draw(true, true); left -= 1; left ? requestAnimationFrame(next) : done(); };
      requestAnimationFrame(next);
    })"""
    browser("js", source=hold)
    try:
        view = {"extra": {"ds": {"scale": 0.4, "offset": [0, 100]}}}  # lines out of sight are not in the page
        graph |= {"nodes": nodes, "links": links, "last_node_id": 400, "last_link_id": 400, **view}
        browser("load", workflow=graph)
        until(browser, lambda: said(browser, "planning") == 64)
        browser("js", source=draw)
        assert said(browser, "planning") == 64
        # Two at a time, whoever else asks.
        assert browser("js", source="window.__asked.length") == 2
        browser("js", source="void window.__answer()")
        until(browser, lambda: said(browser, "Fits") == 64)
        assert questions(browser) == 4
        browser("set", node=100, widget="chunk", value=2)  # another's question
        browser("set", node=101, widget="chunk", value=9)
        until(browser, lambda: questions(browser) == 5 and said(browser, "Fits") == 64)
        browser("set", node=clip["id"], widget="frames", value=17)
        until(browser, lambda: questions(browser) == 10 and said(browser, "Fits") == 64)
        time.sleep(2)  # five looks at all of them
        assert questions(browser) == 10
    finally:
        browser("js", source="void (app.api.fetchApi = window.__fetch)")


def said(browser, beginning: str) -> int:
    """Count the lines that begin so."""
    return len([text for text, _ in browser("lines") if text.startswith(beginning)])


def questions(browser) -> int:
    """Count the plans that were asked for, each of them once."""
    asked = browser("js", source="window.__asked")
    assert len(asked) == len(set(asked))
    return len(asked)


def until(browser, holds) -> None:
    for _ in range(120):
        if holds():
            return
        time.sleep(0.5)
    pytest.fail(f"not in a minute: {browser('lines')[:5]}")


@pytest.mark.parametrize(
    ("language", "running", "cancelled"), [("en", "encode: planning", "Cancelled"), ("zh", "编码：正在规划", "已取消")]
)
def test_a_cancelled_run_says_so(browser, comfy, language, running, cancelled):
    opened(browser, comfy, language=language)
    browser("load", workflow=workflow("Try it - demo clip", frames=25))
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1)
    browser("js", source="void app.queuePrompt(0, 1)")
    # Something is said before the first chunk is done.
    browser("line", until=running)
    comfy.interrupt()
    assert browser("line", until=cancelled)["mood"] == "quiet"


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_optimize_shows_two_widgets_and_the_rest_behind_one_switch(browser, comfy, shots, renderer):
    opened(browser, comfy, renderer)
    nodes = browser("load", workflow=json.loads(SAVED["seedvr2_upscale_decode"].read_text()))
    optimize = node(nodes, "ZeroWasteVAEOptimize")
    toggles = {name: value for name, kind, value in optimize["widgets"] if kind == "toggle"}
    assert list(toggles) == [*TOGGLES, "direct"]  # the third state of one of them
    assert toggles["triton_fusion"] and not toggles["fp8"]
    find = f"app.graph.nodes.find((n) => String(n.id) === '{optimize['id']}')"
    if renderer == "canvas":
        shown = f"{find}.widgets.filter((w) => {find}.isWidgetVisible(w)).map((w) => w.name)"
        assert browser("js", source=shown) == ["precision", "vram_gb", "expert", "tune"]
        small = browser("js", source=f"{find}.size[1]")
        browser("js", source=f"{find}.widgets.find((w) => w.name === 'expert').callback()")
        names = [name for name, _, _ in optimize["widgets"]]
        assert browser("js", source=shown) == names and set(TOGGLES) < set(names)
        assert browser("js", source=f"{find}.size[1]") > small + 200
        label = f"{find}.widgets.find((w) => w.name === 'fp8').label"
        assert browser("js", source=label) == "8-bit products (fp8) (no effect here)"
        browser("shot", file=str(shots / "optimize-canvas-open.png"), nodes=[optimize["id"]])
        browser("js", source=f"{find}.widgets.find((w) => w.name === 'expert').callback()")
        assert browser("js", source=f"{find}.size[1]") == small
    else:
        text = f"document.querySelector('[data-node-id=\"{optimize['id']}\"]').innerText"
        until(browser, lambda: "Precision" in browser("js", source=text))  # rows may come late
        rows = browser("js", source=text)
        assert "Fused kernels" not in rows and "Show advanced inputs" in rows
    browser("shot", file=str(shots / f"optimize-{renderer}.png"), nodes=[optimize["id"]])


def test_file_list_is_refreshed_by_its_button(browser, comfy):
    opened(browser, comfy)
    loader = node(browser("load", workflow=workflow("Try it - demo clip")), "ZeroWasteVAELoader")
    path = comfy.base / "models" / "vae" / "arrived_later.safetensors"
    path.write_bytes((comfy.base / "models" / "vae" / "tiny.safetensors").read_bytes())
    assert path.name not in browser("options", node=loader["id"], widget="vae_name")
    browser("press", node=loader["id"], widget="refresh", until=path.name, listed="vae_name")
    path.unlink()


def test_chinese(browser, comfy, shots):
    opened(browser, comfy, language="zh")
    nodes = browser("load", workflow=workflow("Try it - demo clip"))
    assert browser("line", until="放得下")["text"].endswith("整帧，精确")
    sheet = browser("details", until="放得下")
    assert "没有 CUDA 设备" in sheet["text"] and "（来自前面的节点）" in sheet["text"]
    assert not set("(;:") & set(sheet["text"])
    check_sheet(sheet)
    browser("view", file=str(shots / "plan-zh.png"))
    decode = node(nodes, "ZeroWasteVAEDecode")["id"]
    browser("set", node=decode, widget="tiling", value="blended")
    labels = f"app.graph.nodes.find((n) => String(n.id) === '{decode}').widgets.map((w) => w.label)"
    found = browser("js", source=labels)
    assert "显存上限 (GB)，0 = 自动" in found and "分块大小（像素），0 = 自动" in found
    browser("key", keys="Escape")
    browser("set", node=decode, widget="tiling", value="auto")
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)
    assert browser("run") == ["execution_success", None]
    ran = browser("details", until="每帧")["text"].partition("上次运行")[2]
    assert "普通 torch（NCDHW），fp32" in ran and not set("(;:,") & set(ran)
    browser("view", file=str(shots / "result-zh.png"))
    browser("key", keys="Escape")


def test_the_parameters_tab_shows_values_only_and_leaves_the_line_alone(browser, comfy, shots):
    opened(browser, comfy)
    nodes = browser("load", workflow=workflow("Try it - demo clip"))
    decode = node(nodes, "ZeroWasteVAEDecode")["id"]
    before = browser("line", until="Fits:")["box"]
    find = f"app.graph.nodes.find((n) => String(n.id) === '{decode}')"
    toggle = "[...document.querySelectorAll('button')].find((e) => e.ariaLabel === 'Toggle properties panel')"
    shown = "document.body.innerText.includes('Parameters')"  # the front end remembers whether it is open
    browser("js", source=f"(app.canvas.selectNode({find}), {shown} || {toggle}.click(), "
                         "new Promise((r) => setTimeout(r, 2000)))")  # fmt: skip
    text = browser("js", source="document.body.innerText")
    assert "Parameters" in text and "zerowaste_status" not in text
    # The tab writes the width of its column to every widget of the node.
    browser("js", source=f"void {find}.widgets.forEach((w) => {{ w.width = 900; }})")
    time.sleep(1)
    assert browser("line", until="Fits:")["box"] == pytest.approx(before, abs=2)
    browser("view", file=str(shots / "parameters.png"))
    browser("js", source=f"(document.querySelector('button[aria-label*=\"properties panel\" i]') ?? {toggle}).click()")


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_the_line_stays_in_its_node_at_every_zoom(browser, comfy, shots, renderer):
    opened(browser, comfy, renderer)
    nodes = browser("load", workflow=workflow("Try it - demo clip"))
    decode = node(nodes, "ZeroWasteVAEDecode")
    browser("line", until="Fits:")
    for scale in (0.4, 1, 2):
        browser("shot", file=str(shots / f"zoom-{renderer}-{scale}.png"), nodes=[decode["id"]], scale=scale)
        now = node(browser("nodes"), "ZeroWasteVAEDecode")
        left, top, right, bottom = browser("line", until="Fits:")["box"]
        zoom, x, y = browser("js", source="[app.canvas.ds.scale, ...app.canvas.ds.offset]")
        dx, dy = browser("js", source="(({ left, top }) => [left, top])(app.canvas.canvas.getBoundingClientRect())")
        x0, y0 = dx + (now["pos"][0] + x) * zoom, dy + (now["pos"][1] + y) * zoom
        x1, y1 = x0 + now["size"][0] * zoom, y0 + now["size"][1] * zoom
        assert x0 - 1 <= left < right <= x1 + 1
        assert y0 - 1 <= top < bottom <= y1 + 1
        assert bottom - top == pytest.approx(26 * zoom, rel=0.2)


@pytest.mark.parametrize(
    "words",
    ["oom", "out of memory", "vram", "memory", "tiled", "slow", "seedvr2", "wan", "qwen", "flux", "long video",
     "slow vae", "wan vae", "vae oom"],
)  # fmt: skip
def test_search_finds_decode_and_optimize(browser, comfy, words):
    """In the frontend's own search box."""
    opened(browser, comfy)
    browser("load", workflow={"nodes": [], "links": [], "version": 0.4})
    found = browser("search", words=words)
    assert "Zero-Waste VAE Decode" in found
    assert "Zero-Waste VAE Optimize" in found
    assert "Zero-Waste VAE Decode" not in browser("search", words=f"{words} zzz")


def test_a_decode_in_a_subgraph_plans_and_reports(browser, comfy):
    opened(browser, comfy)
    nodes = browser("load", workflow=workflow("Try it - demo clip"))
    decode = node(nodes, "ZeroWasteVAEDecode")["id"]
    find = f"app.graph.nodes.find((n) => String(n.id) === '{decode}')"
    browser("js", source=f"void app.graph.convertToSubgraph(new Set([{find}]))")
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)
    assert browser("run") == ["execution_success", None]
    into = "app.canvas.setGraph([...app.rootGraph.subgraphs.values()].at(-1))"
    browser("js", source=f"({into}, new Promise((done) => setTimeout(done, 1500)))")
    assert "/frame · about" in browser("line", until="whole frames · exact")["text"]
    sheet = browser("details", until="whole frames · exact")
    assert "288 × 176 px, 1 frame (as in the last run)" in sheet["text"]
    browser("key", keys="Escape")
    browser("js", source="void app.canvas.setGraph(app.rootGraph)")


def test_what_a_user_switched_off_is_listed(browser, comfy):
    opened(browser, comfy)
    graph = json.loads(SAVED["demo_encode_decode"].read_text())
    for entry in graph["nodes"]:
        if entry["type"] == "ZeroWasteVAELoader":
            entry["widgets_values"][4] = False  # the fast exact path
        if entry["type"] == "ZeroWasteVAEDemoClip":
            entry["widgets_values"] = [1]
    browser("load", workflow=graph)
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)
    assert browser("run") == ["execution_success", None]
    text = browser("details", until="whole frames · exact")["text"]
    assert "optimisations not in use that you can change" in text
    assert "flash_attention: switched off" in text and "fp8" not in text
    browser("key", keys="Escape")
