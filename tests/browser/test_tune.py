"""Optimize's tuning button, pressed by a real mouse: how a tuning goes, ends, is cancelled, fails, and is found again
by a page that was reloaded. The server's part is its own; only what would be measured on a GPU is not."""

from __future__ import annotations

import json

import pytest
import running
from pages import node, opened

pytestmark = pytest.mark.host

PACK = running.REPOSITORY / "tests" / "host" / "slow_tuner"
#: language -> the button before, under way, at a layer, while it stops, cancelled, done, failed; its tooltip then, at
#: the end and behind a failure.
WORDS = {
    "en": (
        "tune this GPU", "tuning … (click: cancel)", "tuning: 2 of 9 layers", "cancelling …", "tuning cancelled",
        "tuned on this GPU", "not tuned: the fused kernels are off here",
        "kinds of layers tuned on this GPU: 27; left as they were, for lack of time: 3",
    ),
    "zh": (
        "为这块 GPU 调优", "调优中 …", "调优：2/9 种层", "正在取消 …", "已取消调优", "已在这块 GPU 上调优",
        "未调优：融合内核在这里关闭", "已在这块 GPU 上调优的层种数：27; 因时间不足而保持原样：3",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    with running.serving(tmp_path_factory.mktemp("tuning"), running.newest(), others=[PACK]) as server:
        server.ticks = lambda count: server.get(f"/slow_tuner/ticks/{count}")
        yield server


def graph(file: str) -> dict:
    """A loader of `file`, and Optimize behind it."""
    link = [1, 1, 0, 2, 0, "VAE"]
    loader = {"id": 1, "type": "ZeroWasteVAELoader", "pos": [60, 120], "size": [380, 180], "inputs": [],
              "outputs": [{"name": "VAE", "type": "VAE", "links": [1]}], "widgets_values": [file]}  # fmt: skip
    optimize = {"id": 2, "type": "ZeroWasteVAEOptimize", "pos": [520, 120], "size": [380, 180],
                "inputs": [{"name": "vae", "type": "VAE", "link": 1}],
                "outputs": [{"name": "VAE", "type": "VAE", "links": []}]}  # fmt: skip
    rest = {"mode": 0, "order": 0, "flags": {}, "properties": {}}
    return {"nodes": [loader | rest, optimize | rest], "links": [link], "version": 0.4}


def loaded(browser, file: str = "tiny.safetensors") -> str:
    return node(browser("load", workflow=graph(file)), "ZeroWasteVAEOptimize")["id"]


@pytest.mark.parametrize(
    ("renderer", "language"), [("canvas", "en"), ("vue", "en"), ("canvas", "zh"), ("vue", "zh")]
)
def test_the_button_says_how_it_goes(browser, tuning, shots, renderer, language):
    before, starts, runs, stops, cancelled, done, failed, result = WORDS[language]
    opened(browser, tuning, renderer, language=language)
    tuning.ticks(0)
    optimize = loaded(browser)

    def press() -> None:
        browser("click", node=optimize, widget="tune")

    def says(text: str, shot: str = "") -> str:
        """Waits for it, and gives the tooltip."""
        tooltip = browser("label", node=optimize, widget="tune", until=text)
        if shot:
            browser("shot", file=str(shots / f"tune-{shot}-{renderer}-{language}.png"), nodes=[optimize])
        return tooltip

    says(before, "before")
    press()
    says(starts)
    tuning.ticks(2)
    says(runs, "runs")
    # A page that comes later, or a tab of a workflow that is gone back to, follows it too.
    optimize = loaded(browser)
    says(runs)
    press()
    says(stops)
    says(cancelled, "cancelled")
    tuning.ticks(0)
    press()
    tuning.ticks(9)
    assert says(done, "done") == result
    tuning.ticks(0)
    optimize = loaded(browser, "not_a_vae.safetensors")
    says(before)
    press()
    tuning.ticks(4)
    assert says(failed, "failed") == failed.partition("：" if language == "zh" else ": ")[2]


@pytest.mark.parametrize(("server", "renderer"), [("comfy", "canvas"), ("comfy", "vue"), ("old_comfy", "canvas")])
def test_what_cannot_begin_says_why(browser, shots, request, server, renderer):
    """The route as it is, on a machine without a GPU; its reason is longer than the button, whose tooltip has it."""
    opened(browser, request.getfixturevalue(server), renderer)
    optimize = loaded(browser)
    browser("click", node=optimize, widget="tune")
    why = "tuning needs a CUDA GPU: a CPU runs torch's own operators"
    assert browser("label", node=optimize, widget="tune", until="not tuned: tuning needs a CUDA GPU") == why
    find = f"app.graph.nodes.find((n) => String(n.id) === '{optimize}')"
    label = browser("js", source=f"{find}.widgets.find((w) => w.name === 'tune').label")
    drawn = "(app.canvas.ctx.font = `${LiteGraph.NODE_TEXT_SIZE}px ${LiteGraph.NODE_FONT}`, app.canvas.ctx)"
    assert label.endswith("…") and label[:-1] in f"not tuned: {why}"
    assert browser("js", source=f"{drawn}.measureText({json.dumps(label)}).width") < 350
    browser("shot", file=str(shots / f"tune-refused-{server}-{renderer}.png"), nodes=[optimize])
