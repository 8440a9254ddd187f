"""Use Zero-Waste VAE in the whole workflow, on each of ComfyUI's own templates and blueprints that uses a VAE.

They come from the packages comfyui-workflow-templates-json and comfyui-subgraph-blueprints of the newest host's
environment.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import running
from pages import opened

pytestmark = pytest.mark.host

PACKAGES = {
    "comfyui_workflow_templates_json": "templates/*.json",
    "comfyui_subgraph_blueprints": "blueprints/*.json",
}
THEIRS = {"VAEDecode", "VAEDecodeTiled", "VAEEncode", "VAEEncodeTiled"}
OURS = {"ZeroWasteVAEDecode", "ZeroWasteVAEEncode"}
#: Networks without a VAE, by the beginnings of their files' names: no plan is promised for them, for any other one is.
THEIR_OWN = ("pixel_space", "hidream_o1")

LOAD = """(async (graph) => {
  await app.loadGraphData(graph, true, false, app.extensionManager.workflow.activeWorkflow);
  for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
  return (await app.graphToPrompt()).output;
})(%s)"""
#: { after }: the prompt; { left }: kinds of nodes; { plans }: { file, title } of each decode.
ADOPT = """(async () => {
  const load = (name) => import(`/extensions/ComfyUI-ZeroWasteVAE/js/${name}.js`);
  const names = ["adopt", "graph", "question", "plans"];
  const [{ adoptAll }, { allNodes }, { vaeFile }, { planFor }] = await Promise.all(names.map(load));
  const done = await adoptAll();
  const after = (await app.graphToPrompt()).output;
  const plans = [];
  for (const node of allNodes().filter((one) => one.comfyClass === "ZeroWasteVAEDecode")) {
    const file = vaeFile(node);
    const query = { model: file ?? "", width: 64, height: 64, frames: 1 };
    while (file && planFor(query) === undefined) await new Promise((done) => setTimeout(done, 50));
    const { plan } = (file && planFor(query)) ?? {};
    plans.push([file ?? null, plan?.assumed_as ?? null]);
  }
  const left = allNodes().map((node) => node.comfyClass);
  return { done, after, left, plans };
})()"""
UNDO = """(async () => {
  await app.extensionManager.workflow.activeWorkflow.changeTracker.undo();
  return (await app.graphToPrompt()).output;
})()"""


def nodes_in(graph: dict) -> list[dict]:
    inner = [node for sub in graph.get("definitions", {}).get("subgraphs", []) for node in sub["nodes"]]
    return [*graph.get("nodes", []), *inner]


def kinds_in(graph: dict) -> set[str]:
    return {node["type"] for node in nodes_in(graph)}


def files_in(graph: dict) -> set[str]:
    """Of VAEs and checkpoints. The frontend may show another one in a loader: it moves the values of some subgraphs."""
    loaders = [node for node in nodes_in(graph) if re.fullmatch("VAELoader|.*CheckpointLoader.*", node["type"])]
    return {node["widgets_values"][0] for node in loaders if isinstance(node.get("widgets_values"), list)}


def found() -> list[Path]:
    """Those with a decode or encode that the action is for."""
    venv = Path(os.environ.get("COMFY_VENV") or running.CACHE / "venv")
    files = [p for name, files in PACKAGES.items() for p in sorted(venv.glob(f"lib/*/site-packages/{name}/{files}"))]
    graphs = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in files]
    return [path for path, graph in graphs if isinstance(graph, dict) and kinds_in(graph) & THEIRS]


FOUND = found()


def is_link(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], int)


def unadopted(prompt: dict, before: dict) -> dict:
    """The prompt with ComfyUI's own nodes in the place of ours, by what they are fed with, and without Optimize."""
    optimize = {name for name, node in prompt.items() if node.get("class_type") == "ZeroWasteVAEOptimize"}

    def past(link: object) -> object:
        while is_link(link) and link[0] in optimize:
            link = prompt[link[0]]["inputs"]["vae"]
        return link

    fed = {name: {key: past(value) for key, value in node["inputs"].items()} for name, node in prompt.items()}
    names, gone = {}, [name for name in before if before[name].get("class_type") in THEIRS]
    ours = [name for name, node in prompt.items() if node.get("class_type") in OURS and name not in before]
    for _ in range(len(ours)):  # what one is fed with may have been replaced, too
        for name in ours:
            given = {key: renamed(value, names) for key, value in fed[name].items() if is_link(value)}
            alike = [old for old in gone if links_of(before[old]) == given]
            if name not in names and alike:
                names[name] = alike[0]
                gone.remove(alike[0])
    assert not gone and len(names) == len(ours)
    back = {}
    for name, inputs in fed.items():
        if name in optimize:
            continue
        if name in names:
            back[names[name]] = before[names[name]]
        else:
            back[name] = prompt[name] | {"inputs": {key: renamed(value, names) for key, value in inputs.items()}}
    return back


def known(prompt: dict) -> dict:
    """Without nodes that this host does not have yet, whose inputs nobody knows the names of."""
    return {name: node for name, node in prompt.items() if "class_type" in node}


def steady(prompt: dict) -> dict:
    """Without the mask of Painter, which is a new file in each prompt."""
    for node in prompt.values():
        if node.get("class_type") == "Painter":
            node["inputs"].pop("mask", None)
    return prompt


def links_of(node: dict) -> dict:
    return {key: value for key, value in node["inputs"].items() if is_link(value)}


def renamed(value: object, names: dict[str, str]) -> object:
    return [names.get(value[0], value[0]), value[1]] if is_link(value) else value


@pytest.mark.skipif(not FOUND, reason="needs the packages of ComfyUI's templates and blueprints beside the newest host")
@pytest.mark.parametrize("path", FOUND, ids=[p.stem if "templates" in str(p) else f"blueprint-{p.stem}" for p in FOUND])
def test_every_decode_and_encode_is_replaced_and_comes_back(browser, comfy, path):
    """In subgraphs too; all else is as it was, and one step of undo brings everything back."""
    opened(browser, comfy)
    graph = json.loads(path.read_text(encoding="utf-8"))
    before = steady(browser("js", source=LOAD % json.dumps(graph)))
    own = browser("problems", forget=True)  # the frontend's, of its own template
    told = browser("js", source=ADOPT)
    assert browser("problems") == []
    assert told["done"] and not THEIRS & set(told["left"])
    assert known(unadopted(steady(told["after"]), before)) == known(before)
    assert steady(browser("js", source=UNDO)) == before
    assert set(browser("problems", forget=True)) <= set(own)
    plans = [(file, title) for file, title in told["plans"] if file in files_in(graph)]
    assert [plan for plan in plans if bool(plan[1]) == plan[0].lower().startswith(THEIR_OWN)] == []
