"""The frontends have the names that web/js uses, as they are listed for them."""

from __future__ import annotations

import json

import pytest
from contract import FRONTEND, names
from pages import opened

pytestmark = pytest.mark.host

#: Those of the names that are undefined here.
MISSING = """(() => {
  const { app, LiteGraph } = window;
  const bases = { app, api: app.api, LiteGraph, node: LiteGraph.createNode("VAEDecode"), graph: app.graph };
  const found = (name) => name.split(".").reduce((at, part, i) => (i ? at?.[part] : bases[part]), undefined);
  return %s.filter((name) => found(name) === undefined);
})()"""


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
@pytest.mark.parametrize("server", ["comfy", "new_comfy", "old_comfy"])
def test_the_frontends_have_the_names_that_were_seen_in_them(browser, request, server, renderer):
    """The oldest, which draws its nodes only, lacks the later ones: else they would be listed as older."""
    if (server, renderer) == ("old_comfy", "vue"):
        pytest.skip("the oldest frontend draws its nodes only")
    opened(browser, request.getfixturevalue(server), renderer)
    browser("load", workflow={"nodes": [], "links": [], "version": 0.4})
    listed = {name: seen for name, seen in names(FRONTEND).items() if not name.startswith("event ")}
    later = [name for name, seen in listed.items() if seen != "1.27"]
    missing = browser("js", source=MISSING % json.dumps(list(listed)))
    assert missing == (later if server == "old_comfy" else [])
