"""Taking "Use Zero-Waste VAE" as a user does, and what became of the graph."""

from __future__ import annotations

import time

import pytest

ENTRY = "Use Zero-Waste VAE"
EVERYWHERE = "app.extensionManager.command.execute('ZeroWasteVAE.UseEverywhere').then(() => 1)"
ANYWHERE = "[app.rootGraph, ...app.rootGraph.subgraphs.values()].flatMap((g) => g.nodes).filter((n) => !n.subgraph)"
INTO_SUBGRAPH = """(async () => {
  app.canvas.setGraph([...app.rootGraph.subgraphs.values()][0]);
  await new Promise((done) => setTimeout(done, 1500));
})()"""


def of(prompt: dict, kind: str) -> dict:
    return {name: n["inputs"] for name, n in prompt.items() if n["class_type"] == kind}


def adopt(browser, node: str, entry: str = ENTRY) -> None:
    """A right click and this entry, until the node is another one: whether tiles are needed is asked of the server."""
    browser("menu", node=node, entry=entry)
    for _ in range(100):
        if browser("js", source=f"!app.canvas.graph.getNodeById({node})"):
            return
        time.sleep(0.1)
    pytest.fail(f"node {node} is still there")


def nodes_anywhere(browser) -> list[tuple[str, str]]:
    """(id, type) of every node that is no subgraph."""
    return [tuple(node) for node in browser("js", source=f"({ANYWHERE}).map((n) => [String(n.id), n.type])")]


def until_kinds(browser, kinds: list[str]) -> None:
    for _ in range(100):
        if sorted(kind for _, kind in nodes_anywhere(browser)) == sorted(kinds):
            return
        time.sleep(0.1)
    pytest.fail(f"{nodes_anywhere(browser)} instead of {kinds}")


def undo_to(browser, prompt: dict) -> None:
    """One step of undo, after which the graph gives this prompt again."""
    browser("key", keys="Control+z")
    for _ in range(50):
        if browser("prompt") == prompt:
            return
        time.sleep(0.2)
    assert browser("prompt") == prompt
