"""The status line and its sheet never tell of another run, another workflow or another question."""

from __future__ import annotations

import time

import pytest
import test_quantised as quantised
from adopting import adopt
from pages import node, opened, workflow
from test_adopt import graph, tiny_wan

pytestmark = pytest.mark.host

FRONTENDS = ["comfy", "new_comfy"]
TABS = "app.extensionManager.workflow"
#: Messages of the host's own in front of the page.
MESSAGES = "document.querySelectorAll('.p-toast-message, .p-dialog, [role=alertdialog]').length"
#: The colour of the dot before a line.
DOT = """getComputedStyle([...document.querySelectorAll('[data-zerowaste=status]')]
  .find((e) => e.innerText.includes('%s')), '::before').backgroundColor"""


@pytest.fixture(params=FRONTENDS)
def host(request):
    return request.getfixturevalue(request.param)


def fresh(server) -> None:
    """Nothing of earlier runs is kept."""
    server.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(2)


def decode_of(browser) -> str:
    return node(browser("nodes"), "ZeroWasteVAEDecode")["id"]


def until_idle(server) -> None:
    for _ in range(300):
        if not any(server.get("/queue").values()):
            return
        time.sleep(0.3)
    pytest.fail("the queue does not end")


def compare_section(browser) -> str:
    return browser("js", source="document.querySelector('[data-zerowaste=compare]').parentElement.innerText")


def test_a_failure_is_forgotten_once_something_else_is_asked_for(browser, host):
    opened(browser, host)
    browser("load", workflow=workflow("Try it - demo clip"))
    decode = decode_of(browser)
    browser("set", node=decode, widget="vram_gb", value=0.05)
    assert browser("line", until="Does not fit")["text"].startswith("Does not fit 0.05 GB")
    assert browser("run")[0] == "execution_error"
    browser("key", keys="Escape")
    assert browser("line", until="Stopped")["mood"] == "bad"
    time.sleep(2)  # looked at several times: it stays until something changes
    assert browser("line", until="Stopped")["mood"] == "bad"
    browser("set", node=decode, widget="vram_gb", value=0)
    browser("line", until="Fits")
    browser("set", node=decode, widget="vram_gb", value=0.05)
    browser("line", until="Does not fit")


def test_a_cancel_is_forgotten_once_something_else_is_asked_for(browser, host):
    opened(browser, host)
    browser("load", workflow=workflow("Try it - demo clip", frames=25))
    fresh(host)
    browser("js", source="void app.queuePrompt(0, 1)")
    browser("line", until="encode:")
    host.interrupt()
    browser("line", until="Cancelled")
    clip = node(browser("nodes"), "ZeroWasteVAEDemoClip")["id"]
    browser("set", node=clip, widget="frames", value=21)
    browser("line", until="Not run yet")


def test_a_run_is_shown_in_the_workflow_it_was_queued_from(browser, host, shots, request):
    """Another tab has the same nodes under the same numbers."""
    opened(browser, host)
    browser("load", workflow=workflow("Try it - demo clip", frames=13))
    first = browser("js", source=f"{TABS}.activeWorkflow.path")
    fresh(host)
    browser("js", source="void app.queuePrompt(0, 1)")
    browser("line", until="encode:")
    browser("load", workflow=workflow("Try it - demo clip", frames=13))
    assert browser("js", source=f"{TABS}.activeWorkflow.path") != first
    seen = set()
    while any(host.get("/queue").values()):
        seen |= {text for text, _ in browser("lines")}
        time.sleep(0.2)
    time.sleep(2)
    seen |= {text for text, _ in browser("lines")}
    browser("view", file=str(shots / f"other-tab-{request.node.callspec.id}.png"))
    assert {text for text in seen if not text.startswith(("Fits", "planning"))} == {"Not run yet"}
    # What it gave is there when one comes back, although nobody looked.
    back = "app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')"
    assert browser("js", source=f"{back}.then(() => {TABS}.activeWorkflow.path)") == first
    browser("line", until="whole frames · exact")
    assert "Not run yet" not in [text for text, _ in browser("lines")]


def test_a_run_from_the_cache_is_reported(browser, host):
    opened(browser, host)
    browser("load", workflow=workflow("Try it - demo clip"))
    fresh(host)
    assert browser("run") == ["execution_success", None]
    ran = {text for text, _ in browser("lines")}
    browser("load", workflow=workflow("Try it - demo clip"))
    assert "Not run yet" in [text for text, _ in browser("lines")]
    assert browser("run") == ["execution_success", None]
    browser("line", until="whole frames · exact")
    assert {text for text, _ in browser("lines")} == ran


def test_the_oldest_host_says_that_a_run_came_from_its_cache(browser, old_comfy):
    opened(browser, old_comfy)
    browser("load", workflow=workflow("Try it - demo clip"))
    fresh(old_comfy)
    assert browser("run") == ["execution_success", None]
    browser("load", workflow=workflow("Try it - demo clip"))
    assert browser("run") == ["execution_success", None]
    assert browser("line", until="taken from ComfyUI's cache")["mood"] == "quiet"


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_what_is_approximate_has_an_amber_dot(browser, host, shots, request, renderer):
    opened(browser, host, renderer)
    browser("load", workflow=workflow("Try it - demo clip"))
    assert browser("line", until="Fits")["mood"] == "good"
    exact = browser("js", source=DOT % "Fits")
    decode = decode_of(browser)
    for widget, value in (("tiling", "blended"), ("tiling.tile", 96), ("tiling.overlap", 16)):
        browser("set", node=decode, widget=widget, value=value)
    assert browser("line", until="approximate")["mood"] == "approximate"
    browser("shot", file=str(shots / f"amber-{request.node.callspec.id}.png"), nodes=[decode])
    assert browser("js", source=DOT % "approximate") == "rgb(217, 119, 6)" != exact
    fresh(host)
    assert browser("run") == ["execution_success", None]
    assert browser("line", until="blended tiles · approximate")["mood"] == "approximate"


def test_a_latent_of_other_channels_is_seen_before_the_run(browser, host, shots, request):
    opened(browser, host)
    loaded = graph("tiny.safetensors", "ZeroWasteVAEDecode", ())
    loaded["nodes"][1] |= {"type": "EmptyLatentImage", "widgets_values": [512, 512, 1]}
    browser("load", workflow=loaded)
    fresh(host)
    line = browser("line", until="channels")
    assert (line["text"], line["mood"], line["cut"]) == ("Latent has 4 channels, VAE takes 16", "bad", False)
    sheet = browser("details", until="channels")["text"]
    assert "this VAE takes 16" in sheet and "Connect the VAE that belongs to the model" in sheet
    browser("view", file=str(shots / f"channels-{request.node.callspec.id}.png"))
    browser("key", keys="Escape")


def test_file_for_our_loader_is_named(browser, host, shots, request):
    """A file that only our loader reads is named before the run."""
    quantised.write(host)
    host.get("/object_info/ZeroWasteVAELoader")  # lists the files
    opened(browser, host)
    loaded = graph(quantised.PACKED, "ZeroWasteVAEDecode", ())
    browser("load", workflow=loaded)
    line = browser("line", until="Load it")
    assert line["text"] == "Load it with Zero-Waste VAE Loader" and not line["cut"]
    assert line["mood"] == "bad"
    sheet = browser("details", until="Load it")
    assert "take its codes for weights" in sheet["text"] and "GB" not in sheet["text"] and not sheet["clipped"]
    browser("view", file=str(shots / f"quantised-{request.node.callspec.id}.png"))
    browser("key", keys="Escape")
    loaded["nodes"][0] |= {"type": "ZeroWasteVAELoader", "widgets_values": [quantised.PACKED, "auto", 0, 0, True]}
    browser("load", workflow=loaded)
    assert browser("line", until="Fits")["mood"] == "good"


def test_a_comparison_that_cannot_be_is_not_offered(browser, host, shots, request):
    """ComfyUI's SeedVR2 VAE has one size, which the demo's is not."""
    opened(browser, host)
    browser("load", workflow=workflow("Try it - demo clip"))
    fresh(host)
    assert browser("run") == ["execution_success", None]
    sheet = browser("details", until="whole frames · exact")["text"]
    assert "Nothing to compare with: this ComfyUI has no network of its own for a VAE of these sizes" in sheet
    assert browser("js", source="document.querySelector('[data-zerowaste=compare]').disabled")
    browser("view", file=str(shots / f"compare-off-{request.node.callspec.id}.png"))
    browser("key", keys="Escape")


def test_a_comparison_that_runs_is_remembered_and_stays_off_the_graph(browser, host, shots, request, host_places):
    path = tiny_wan(host, host_places)
    opened(browser, host)
    loaded = graph(path.name, "VAEDecode", ())
    loaded["nodes"][1]["widgets_values"] = [192, 160, 17, 1]
    browser("load", workflow=loaded)
    adopt(browser, "3")
    assert browser("run") == ["execution_success", None]
    browser("details", until="/frame")
    messages = browser("js", source=MESSAGES)
    browser("js", source="document.querySelector('[data-zerowaste=compare]').click()")
    for _ in range(2):
        assert "ComfyUI's own decode runs on the same latent" in compare_section(browser)
        assert browser("js", source="document.querySelector('[data-zerowaste=compare]').disabled")
        browser("key", keys="Escape")
        browser("details", until="/frame")
    host.interrupt()
    for _ in range(100):
        if "Cancelled" in browser("js", source="document.querySelector('.zerowaste-compare')?.innerText ?? ''"):
            break
        time.sleep(0.3)
    assert browser("js", source=MESSAGES) == messages
    # The result stands above everything else.
    browser("js", source="document.querySelector('[data-zerowaste=compare]').click()")
    for _ in range(300):
        first = browser("js", source="document.querySelector('[data-zerowaste=details]').innerText")
        if first.startswith("Beside ComfyUI's own"):
            break
        time.sleep(0.3)
    assert first.startswith("Beside ComfyUI's own")
    time.sleep(1)
    browser("view", file=str(shots / f"compare-{request.node.callspec.id}.png"))
    assert browser("js", source=MESSAGES) == messages
    browser("key", keys="Escape")


@pytest.mark.parametrize("server", ["comfy", "new_comfy", "old_comfy"])
@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_the_line_ends_where_the_widgets_end(browser, shots, request, server, renderer):
    if (server, renderer) == ("old_comfy", "vue"):
        pytest.skip("the oldest frontend draws its nodes only")
    opened(browser, request.getfixturevalue(server), renderer)
    browser("load", workflow=workflow("Try it - demo clip"))
    browser("line", until="Fits")
    decode = decode_of(browser)
    browser("shot", file=str(shots / f"line-{server}-{renderer}.png"), nodes=[decode])
    left, _, right, bottom = browser("line", until="Fits")["box"]
    if renderer == "canvas":
        box = browser("js", source=f"""(() => {{
          const {{ canvas, graph }} = app;
          const n = graph.nodes.find((one) => String(one.id) === '{decode}');
          const at = canvas.canvas.getBoundingClientRect();
          const [x, y, scale] = [...canvas.ds.offset, canvas.ds.scale];
          const [from, to] = [n.pos[0] + 15, n.pos[0] + n.size[0] - 15];
          const across = (at_x) => at.left + (at_x + x) * scale;
          return [across(from), across(to), at.top + (n.pos[1] + n.size[1] + y) * scale];
        }})()""")
    else:
        box = browser("js", source=f"""(() => {{
          const one = document.querySelector('[data-node-id="{decode}"]');
          const widget = [...one.querySelectorAll('input')].map((e) => e.closest('[class*=rounded]') ?? e)[0];
          const [w, n] = [widget.getBoundingClientRect(), one.getBoundingClientRect()];
          return [n.left + 12, w.right, n.bottom];
        }})()""")
    assert (left, right) == pytest.approx(box[:2], abs=2)
    # Nodes of elements have a badge and a button there.
    assert 0 <= box[2] - bottom <= (20 if renderer == "canvas" else 75)


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_small_limits_are_shown_as_they_are(browser, host, shots, request, renderer):
    opened(browser, host, renderer)
    browser("load", workflow=workflow("Try it - demo clip"))
    decode = decode_of(browser)
    browser("set", node=decode, widget="vram_gb", value=0.05)
    browser("line", until="Does not fit 0.05")
    browser("shot", file=str(shots / f"small-{request.node.callspec.id}.png"), nodes=[decode])
    if renderer == "canvas":
        widgets = f"app.graph.nodes.find((n) => String(n.id) === '{decode}').widgets"
        shown = f"{widgets}.find((w) => w.name === 'vram_gb')._displayValue"
    else:
        shown = f"document.querySelector('[data-node-id=\"{decode}\"] input').value"
    assert browser("js", source=shown) == "0.05"


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_switches_without_effect_are_grey(browser, host, shots, request, renderer):
    """The reason is in the tooltip; the value that the workflow has stays."""
    opened(browser, host, renderer)
    place = {"id": 1, "type": "ZeroWasteVAEOptimize", "pos": [400, 300], "size": [380, 120], "mode": 0, "order": 0}
    browser("load", workflow={"nodes": [place | {"flags": {}, "properties": {}}], "links": [], "version": 0.4,
                              "last_node_id": 1, "last_link_id": 0})  # fmt: skip
    find = "app.graph.nodes.find((n) => String(n.id) === '1')"
    browser("js", source=f"void ({find}.showAdvanced = true, {find}.setSize([400, {find}.computeSize()[1]]))")
    time.sleep(1)
    held = f"{find}.widgets.find((w) => w.name === 'fp8')"
    disabled, tooltip = browser("js", source=f"[{held}.disabled, {held}.tooltip]")
    assert disabled and tooltip.startswith("No effect on this machine: ")
    assert not browser("js", source=f"{find}.widgets.find((w) => w.name === 'vram_gb').disabled")
    browser("shot", file=str(shots / f"grey-{request.node.callspec.id}.png"), nodes=["1"])
