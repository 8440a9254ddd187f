"""Every edge of the status line that a draft has: on and off, with its file and without."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pages import opened
from safetensors.torch import save_file
from test_adopt import tiny_wan
from test_status import DECODE, lines, put, ran, state, until
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families.taehv import ARCHITECTURE, SCALE, SHIFT, Config

pytestmark = pytest.mark.host

WORDS = {
    "en": {
        "draft": "draft: TAEHV · ", "exact": "exact", "full": "full",
        "missing": "No draft: put taew2_1.safetensors into models/vae_approx (a tiny decoder of Wan 2.1's latents); "
        "switch Draft off for the VAE itself",
    },
    "zh": {
        "draft": "草稿：TAEHV · ", "exact": "精确", "full": "完整",
        "missing": "无法出草稿：请把 taew2_1.safetensors 放入 models/vae_approx（Wan 2.1 潜变量的小解码器）；"
        "关闭草稿则由 VAE 自己解码",
    },
}  # fmt: skip
FULL = "document.querySelector('[data-zerowaste=full]')"
REFRESH = "app.refreshComboInNodes().then(() => 1)"


@pytest.fixture
def taew(comfy):
    """The file of a small decoder of Wan's latents, not there yet; gone afterwards."""
    path = comfy.base / "models" / "vae_approx" / "taew2_1.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path
    path.unlink(missing_ok=True)


def write(path: Path) -> None:
    drawn = random_checkpoint(Config(None, (8, 8, 12, 16)), architecture=ARCHITECTURE).tensors
    save_file({n: t for n, t in drawn.items() if n not in (SCALE, SHIFT)}, path)


@pytest.mark.parametrize(("renderer", "language"), [("canvas", "en"), ("vue", "zh")])
def test_a_draft_and_the_way_back(browser, comfy, host_places, shots, taew, renderer, language):
    words = WORDS[language]

    def seen(name: str) -> list[str]:
        browser("view", file=str(shots / f"draft-{name}-{renderer}-{language}.png"))
        return state(browser)[:2]

    vae = tiny_wan(comfy, host_places).name
    opened(browser, comfy, renderer, language=language)
    browser("js", source=REFRESH)
    browser("load", workflow=lines(vae))
    assert until(browser, "planned")[1] == "good"
    assert browser("js", source=f"{FULL}.hidden")
    # Without its file: red, in words; a file that has come is seen at the next refresh.
    browser("js", source=put(DECODE, "draft", True))
    assert until(browser, "refused")[2] == words["missing"]
    assert seen("missing") == ["refused", "bad"]
    write(taew)
    browser("js", source=REFRESH)
    text = until(browser, "planned")[2]
    assert text.startswith(words["draft"]) and seen("planned") == ["planned", "approximate"]
    assert browser("js", source=f"{FULL}.innerText") == words["full"]
    # Its run is amber as well, and one click leads back.
    ran(browser, comfy)
    assert state(browser)[2].startswith(words["draft"]) and seen("ran") == ["ran", "approximate"]
    assert "taew2_1.safetensors" in browser("details", until="TAEHV")["text"]
    seen("details")
    browser("key", keys="Escape")
    browser("button", selector="[data-zerowaste=full]")
    assert browser("js", source=f"{DECODE}.widgets.find((w) => w.name === 'draft').value") is False
    assert until(browser, "planned")[2].endswith(words["exact"]) and seen("full") == ["planned", "good"]
    assert browser("js", source=f"{FULL}.hidden")
    # Switched on again, the result is that of the last run; off, a run of the VAE itself is green.
    browser("js", source=put(DECODE, "draft", True))
    assert until(browser, "ran")[1] == "approximate"
    browser("js", source=put(DECODE, "draft", False))
    until(browser, "planned")
    ran(browser, comfy)
    assert state(browser)[1] == "good" and state(browser)[2].endswith(words["exact"])
    # A file that has gone stops the next run, which the line says from then on.
    taew.unlink()
    browser("js", source=put(DECODE, "draft", True))
    assert until(browser, "planned")[1] == "approximate"  # as it was known to be
    assert browser("run")[0] == "execution_error"
    browser("key", keys="Escape")
    assert words["missing"] in until(browser, "failed")[2]
    browser("problems", forget=True)


PREVIEWS = "void app.extensionManager.setting.set('Comfy.Execution.PreviewMethod', {!r})"
#: The pictures that the decode has shown by now, by their sizes in bytes.
GATHER = """void (() => {
  window.__shown = new Set();
  const gather = ({ detail: { displayNodeId, blob } }) => window.__shown.add(`${displayNodeId} ${blob.size}`);
  app.api.addEventListener("b_preview_with_metadata", gather);
})()"""


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_all_frames_are_played_on_the_node(browser, comfy, host_places, shots, taew, renderer):
    """While the decode runs, whichever way the node is drawn; the stop button ends both."""
    write(taew)
    vae = tiny_wan(comfy, host_places).name
    opened(browser, comfy, renderer)
    browser("js", source=PREVIEWS.format("auto"))
    loaded = lines(vae)
    loaded["nodes"][1]["widgets_values"] = [256, 192, 65, 1]
    browser("load", workflow=loaded)
    browser("js", source=GATHER)
    browser("js", source="void app.queuePrompt(0, 1)")
    for _ in range(300):
        time.sleep(0.2)
        if len(shown := browser("js", source="[...window.__shown]")) > 12:
            break
    browser("view", file=str(shots / f"film-{renderer}.png"))
    assert until(browser, "running", "ran")[0] == "running"  # not all of them come at the end
    time.sleep(1)
    browser("view", file=str(shots / f"film-{renderer}-later.png"))
    assert {name.split()[0] for name in shown} == {"3"} and len(shown) > 12
    browser("js", source="void app.api.interrupt()")
    until(browser, "cancelled")
    browser("js", source=PREVIEWS.format("default"))
