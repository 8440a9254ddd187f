"""What the panel asks the planner, from nodes as the frontend has them; needs node, no browser and no ComfyUI."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlencode

import pytest
from zerowaste_vae.nodes.planning import Question

SCRIPT = Path(__file__).resolve().parents[2] / "web" / "js" / "question.js"
# A graph in few words: {name: {"class", "widgets", "inputs": {name: [type, source]}, "off"}} -> question of "decode".
ASK = """
const { question } = await import(process.argv[1]);
const [graph, lastRun] = JSON.parse(process.argv[2]);
const nodes = {};
for (const [name, { class: comfyClass, widgets = {}, inputs = {}, off = {} }] of Object.entries(graph)) {
  class Kind {}
  Kind.nodeData = { input: { optional: Object.fromEntries(Object.entries(off).map(([k, v]) => [k, ["BOOLEAN", v]])) } };
  const node = new Kind();
  node.comfyClass = comfyClass;
  node.widgets = Object.entries(widgets).map(([key, value]) => ({ name: key, value }));
  node.inputs = Object.entries(inputs).map(([key, [type]]) => ({ name: key, type }));
  node.getInputNode = (slot) => nodes[Object.values(inputs)[slot]?.[1]] ?? null;
  nodes[name] = node;
}
console.log(JSON.stringify(question(nodes.decode, lastRun)));
"""

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs node")


def asked(graph: dict, last_run: dict | None = None) -> dict:
    """The question, whose query the server must understand."""
    run = subprocess.run(
        ["node", "--input-type=module", "-e", ASK, SCRIPT.as_uri(), json.dumps([graph, last_run])],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    query = {name: str(value) for name, value in found["query"].items()}
    assert urlencode(query)
    Question.parse(query)
    return found


def chain(decode: dict | None = None, optimize: dict | None = None, **more: dict) -> dict:
    """Loader, Optimize and Decode with these widgets; more: those of the loader, and what Optimize's toggles carry."""
    return {
        "loader": {"class": "ZeroWasteVAELoader", "widgets": {"vae_name": "a.gguf", **more.get("loader", {})}},
        "optimize": {
            "class": "ZeroWasteVAEOptimize", "widgets": optimize or {}, "inputs": {"vae": ["VAE", "loader"]},
            "off": more.get("off", {}),
        },
        "latent": {"class": "EmptyHunyuanLatentVideo", "widgets": {"width": 640, "height": 360, "length": 33}},
        "decode": {
            "class": "ZeroWasteVAEDecode", "widgets": decode or {},
            "inputs": {"samples": ["LATENT", "latent"], "vae": ["VAE", "optimize"]},
        },
    }  # fmt: skip


def test_size_and_file_come_from_the_nodes_before():
    found = asked(chain())
    assert found["source"] == "traced"
    assert found["query"] == {"model": "a.gguf", "width": 640, "height": 360, "frames": 33}


def test_the_nearest_wish_counts():
    optimize, loader = {"vram_gb": 6, "chunk": 1, "ram_gb": 3}, {"vram_gb": 9, "precision": "bf16"}
    graph = chain({"vram_gb": 0, "chunk": 2}, optimize, loader=loader)
    query = asked(graph)["query"]
    assert (query["vram_gb"], query["chunk"], query["ram_gb"], query["precision"]) == (6, 2, 3, "bf16")


def test_nested_and_flat_tiles():
    nested = {"tiling": "blended", "tiling.tile": 256, "tiling.overlap": 32}
    for widgets in (nested, {"tiling": "blended", "tile": 256, "overlap": 32}):
        query = asked(chain(optimize=widgets))["query"]
        assert (query["tiling"], query["tile"], query["overlap"]) == ("blended", 256, 32)
    assert "tile" not in asked(chain({"tiling": "untiled", "tile": 256, "overlap": 32}))["query"]


def test_toggles():
    assert asked(chain(optimize={"triton_fusion": False, "tf32": True}))["query"]["off"] == "triton_fusion"
    assert asked(chain(optimize={"fp8": True, "min_db": 0}))["query"]["precision"] == "fp8"
    assert asked(chain(optimize={"fp8": True, "precision": "fp16"}))["query"]["precision"] == "fp8"
    assert asked(chain(optimize={"fp8": True, "precision": "int8"}))["query"]["precision"] == "int8"
    assert "precision" not in asked(chain(optimize={"fp8": True, "min_db": 45}))["query"]
    reason = {"fp8": {"zerowaste_off": "no CUDA device"}}
    assert "precision" not in asked(chain(optimize={"fp8": True}, off=reason))["query"]


def test_the_last_run_counts_until_the_nodes_before_say_otherwise():
    traced = {"width": 640, "height": 360, "frames": 33}
    last = {"size": {"width": 640, "height": 368, "frames": 33}, "model": "b", "traced": traced}
    assert asked(chain(), last)["source"] == "last_run"
    graph = chain()
    graph["latent"]["widgets"]["length"] = 49
    found = asked(graph, last)
    assert (found["source"], found["query"]["frames"]) == ("traced", 49)


def test_without_any_size_an_example_is_asked_for():
    graph = chain()
    del graph["latent"]["widgets"]
    found = asked(graph)
    assert found["source"] == "example"
    assert (found["query"]["width"], found["query"]["height"], found["query"]["frames"]) == (1280, 720, 21)


def test_a_ring_of_nodes_ends():
    graph = chain()
    graph["latent"] = {"class": "Reroute", "inputs": {"": ["*", "other"]}}
    graph["other"] = {"class": "Reroute", "inputs": {"": ["*", "latent"]}}
    graph["loader"] = {"class": "Reroute", "inputs": {"": ["*", "optimize"]}}
    assert asked(graph)["source"] == "example"
