"""The status line on a narrow page, beside a second tab, and where the page shows an app in place of its nodes."""

from __future__ import annotations

import time

import pytest
from pages import opened
from test_status import fresh, lines, ran, state, until

pytestmark = pytest.mark.host

LINEAR = "Comfy.ToggleLinear"
COMMANDS = "app.extensionManager.command.commands.map((one) => one.id)"


#: What a server with a GPU adds to its plans, where that card's operators were timed.
EXPECTS = """void (app.api.fetchApi = async (path, ...more) => {
  const reply = await Object.getPrototypeOf(app.api).fetchApi.call(app.api, path, ...more);
  if (!path.startsWith('/zerowaste_vae/plan')) return reply;
  const plan = { ...(await reply.json()), expected_low_s: 69.44, expected_high_s: 96.1 };
  return new Response(JSON.stringify(plan), { status: reply.status });
})"""


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_narrow_page(browser, comfy, shots, renderer, language):
    """What a click on the line shows is read whole on a telephone, the time that a run is expected to take with it."""
    settings = {"Comfy.VueNodes.Enabled": renderer == "vue", "Comfy.Locale": language, "Comfy.ColorPalette": "dark"}
    browser("open", url=f"http://127.0.0.1:{comfy.port}", settings=settings, width=390, height=844)
    browser("js", source=EXPECTS)
    loaded = lines()  # of a size that the page has not asked for before: it begins with the last workflow
    loaded["nodes"][1]["widgets_values"][1] += 16 * (1 + 2 * (renderer == "vue") + (language == "zh"))
    browser("load", workflow=loaded)
    until(browser, "planned")
    decode = "app.graph.nodes.find((n) => n.type === 'ZeroWasteVAEDecode')"
    browser("js", source=f"""(() => {{
      const {{ canvas }} = app, n = {decode};
      canvas.ds.scale = 0.9;
      [canvas.ds.offset[0], canvas.ds.offset[1]] = [20 - n.pos[0], 150 - n.pos[1]];
      canvas.setDirty(true, true);
    }})()""")
    time.sleep(1)
    browser("js", source="document.querySelector('[data-zerowaste=status]').click()")
    sheet = browser("details")
    left, top, right, bottom = sheet["box"]
    browser("view", file=str(shots / f"narrow-{renderer}-{language}.png"))
    assert 0 <= left < right <= 390 and 0 <= top < bottom <= 844 and not sheet["clipped"]
    words = {"en": "Expected 69.4 s to 96.1 s: computed for", "zh": "预计 69.4 s 到 96.1 s：为此类显卡计算"}
    assert words[language] in sheet["text"]
    browser("key", keys="Escape")
    browser("js", source="void delete app.api.fetchApi")


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_a_second_tab_has_its_own_runs(browser, comfy, renderer):
    opened(browser, comfy, renderer)
    browser("load", workflow=lines())
    planned = until(browser, "planned")
    fresh(comfy)
    ((name, _),) = browser("beside", url=f"http://127.0.0.1:{comfy.port}", workflow=lines())
    assert name == "ran"
    time.sleep(1)
    assert state(browser)[:2] == planned[:2]
    assert browser("run") == ["execution_success", None]
    until(browser, "ran")  # of what lies in the host's cache


def test_an_app_in_place_of_the_nodes(browser, comfy, shots):
    """The run goes on there, and the line has its result when one comes back."""
    opened(browser, comfy, "vue")
    if LINEAR not in browser("js", source=COMMANDS):
        pytest.skip("this frontend shows no apps")
    browser("load", workflow=lines())
    until(browser, "planned")
    toggle = f"app.extensionManager.command.execute('{LINEAR}').then(() => new Promise((r) => setTimeout(r, 1500)))"
    browser("js", source=toggle)
    fresh(comfy)
    assert browser("run") == ["execution_success", None]
    browser("view", file=str(shots / "app.png"))
    browser("js", source=toggle)
    until(browser, "ran")
    ran(browser, comfy)
