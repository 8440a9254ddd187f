"""Count the clicks and keys of common tasks, as a user does them: they may become fewer, never more."""

from __future__ import annotations

import pytest
from adopting import ENTRY, adopt, of, undo_to, until_kinds
from pages import opened
from test_adopt import graph, tiny_wan

pytestmark = pytest.mark.host

#: Real presses of the mouse and of keys; a chord is one.
COUNT = """(() => {
  window.__actions = 0;
  if (window.__counted) return;
  window.__counted = true;
  const chord = ["Control", "Shift", "Alt", "Meta"];
  const count = (event) => { if (event.isTrusted && !chord.includes(event.key)) window.__actions += 1; };
  for (const kind of ["pointerdown", "keydown"]) window.addEventListener(kind, count, true);
})()"""


@pytest.fixture(params=["comfy", "new_comfy"])
def stock(request, browser, host_places):
    """A workflow of the host's own nodes, from which on actions are counted."""
    server = request.getfixturevalue(request.param)
    opened(browser, server)
    browser("load", workflow=graph(tiny_wan(server, host_places).name, "VAEDecode", ()))
    browser("js", source=COUNT)


def actions(browser) -> int:
    """Those since the last call."""
    return browser("js", source="[window.__actions, (window.__actions = 0)][0]")


def test_a_decode_is_replaced_planned_and_brought_back(browser, stock):
    before = browser("prompt")
    adopt(browser, "3")
    assert of(browser("prompt"), "ZeroWasteVAEDecode")
    assert actions(browser) == 2  # a right click on the node, the entry
    assert browser("line", until="Fits")["mood"] == "good"
    assert actions(browser) == 0
    undo_to(browser, before)
    assert actions(browser) == 1


def test_the_whole_workflow_is_replaced(browser, stock):
    browser("menu", entry=f"{ENTRY} in the whole workflow")
    until_kinds(browser, ["EmptyHunyuanLatentVideo", "PreviewImage", "VAELoader", "ZeroWasteVAEDecode"])
    assert actions(browser) == 2  # a right click beside the nodes, the entry


def test_a_run_is_compared(browser, stock):
    adopt(browser, "3")
    assert browser("run") == ["execution_success", None]
    actions(browser)
    browser("details", until="/frame")
    browser("button", selector="[data-zerowaste=compare]")
    assert "ComfyUI's own decode runs" in browser(
        "js", source="document.querySelector('[data-zerowaste=compare]').parentElement.innerText"
    )
    assert actions(browser) == 2  # the line, the button
    browser("key", keys="Escape")


def test_the_hosts_decode_runs_in_8_bit(browser, stock):
    before = browser("prompt")
    browser("menu", node="1", entry=f"{ENTRY} in 8 bit")
    prompt = browser("prompt")
    ((optimize, inputs),) = of(prompt, "ZeroWasteVAEOptimize").items()
    assert inputs["precision"] == "int8" and prompt["3"]["inputs"]["vae"] == [optimize, 0]
    assert actions(browser) == 2  # a right click on Load VAE, the entry
    undo_to(browser, before)
