"""Compare the frontends of the newest and of the oldest host: words of refusals, and room for nodes put in."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from adopting import ENTRY, adopt
from pages import node, opened, workflow
from test_adopt import graph

pytestmark = pytest.mark.host


@pytest.fixture(params=["comfy", "old_comfy"])
def host(request):
    return request.getfixturevalue(request.param)


def test_refusals_are_chinese(browser, host, shots, request):
    """In the line, in what a click shows, and in the message of the host's own after a run."""
    opened(browser, host, language="zh")
    decode = node(browser("load", workflow=workflow("Try it - demo clip")), "ZeroWasteVAEDecode")["id"]
    browser("set", node=decode, widget="vram_gb", value=0.05)
    browser("line", until="放不下")
    sheet = browser("details", until="放不下")
    assert "即使用最小的分块也需要" in sheet["text"] and "请提高显存上限 (vram_gb)" in sheet["text"]
    assert "needs" not in sheet["text"]
    browser("view", file=str(shots / f"refusal-{request.node.callspec.id}.png"))
    browser("key", keys="Escape")
    kind, message = browser("run")
    assert kind == "execution_error"
    assert message.startswith("此次解码超出其内存限制。288x176 ")
    assert browser("line", until="已停止")["text"].startswith("已停止：此次解码超出其内存限制。")
    browser("view", file=str(shots / f"refusal-run-{request.node.callspec.id}.png"))
    if request.node.callspec.id == "comfy":  # the oldest shows what the server sent before anyone else is told
        browser("js", source="[...document.querySelectorAll('button')].find((e) => e.innerText === '查看详情').click()")
        time.sleep(1.5)
        text = browser("js", source="document.body.innerText")
        browser("view", file=str(shots / "refusal-host.png"))
        assert "PlanError: 此次解码超出其内存限制。288x176 " in text
    browser("key", keys="Escape")


def test_tiles_are_named_in_chinese(browser, host):
    """The oldest host has their widgets beside the choice, the newest brings them with it."""
    opened(browser, host, language="zh")
    decode = node(browser("load", workflow=workflow("Try it - demo clip")), "ZeroWasteVAEDecode")["id"]
    browser("set", node=decode, widget="tiling", value="blended")
    find = f"app.graph.nodes.find((n) => String(n.id) === '{decode}')"
    labels = browser("js", source=f"{find}.widgets.map((w) => w.label)")
    assert {"分块大小（像素），0 = 自动", "分块重叠（像素）"} <= set(labels)


def overlapping(browser) -> list[tuple[str, str]]:
    """Pairs of nodes that cover each other, their titles included."""

    def box(one: dict) -> tuple[float, ...]:
        (x, y), (w, h) = one["pos"], one["size"]
        return x, y - 30, x + w, y + h

    pairs = combinations(browser("nodes"), 2)
    boxes = ((a["type"], b["type"], box(a), box(b)) for a, b in pairs)
    return [(a, b) for a, b, p, q in boxes if p[0] < q[2] and q[0] < p[2] and p[1] < q[3] and q[1] < p[3]]


def crowded(kind: str) -> dict:
    """A graph in which another node stands right below the one of this kind."""
    loaded = graph("tiny.safetensors", "VAEDecode", ())
    above = next(n for n in loaded["nodes"] if n["type"] == kind)
    loaded["nodes"].append(
        loaded["nodes"][1] | {"id": 5, "outputs": [], "pos": [above["pos"][0], above["pos"][1] + above["size"][1] + 40]}
    )
    return loaded


@pytest.mark.parametrize(("kind", "number"), [("VAELoader", "1"), ("VAEDecode", "3")])
@pytest.mark.parametrize(("server", "renderer"), [("comfy", "canvas"), ("comfy", "vue"), ("old_comfy", "canvas")])
def test_what_is_put_in_covers_nobody(browser, shots, request, kind, number, server, renderer):
    """Nor does it grow over anyone when it is drawn, or lose the room of its settings when they are shown."""
    opened(browser, request.getfixturevalue(server), renderer)
    browser("load", workflow=crowded(kind))
    before = len(browser("nodes"))
    assert overlapping(browser) == []
    if kind == "VAELoader":
        browser("menu", node=number, entry=ENTRY)
    else:
        adopt(browser, number)
    time.sleep(2)
    nodes = browser("nodes")
    browser("view", file=str(shots / f"room-{request.node.callspec.id}.png"))
    assert len(nodes) == before + (kind == "VAELoader")
    assert overlapping(browser) == []
    (ours,) = (n for n in nodes if n["type"].startswith("ZeroWaste"))
    assert ours["size"][1] < 260
    if renderer == "canvas":
        find = f"app.graph.nodes.find((n) => String(n.id) === '{ours['id']}')"
        browser("js", source=f"void {find}.widgets.find((w) => w.name === 'expert').callback()")
        time.sleep(1)
        rows = browser("js", source=f"{find}.widgets.map((w) => w.y)")
        assert all(below - above >= 20 for above, below in pairwise(rows))
