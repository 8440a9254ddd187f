"""The decodes in ComfyUI's own templates and blueprints: which of them the engine runs, and why it leaves the others.

They come from the packages comfyui-workflow-templates-json and comfyui-subgraph-blueprints, in this environment or in
that of COMFY_VENV (tools/host_ci.sh makes it).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae import load
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.families import by_file

from .small import small

#: Package -> its files, the version that was counted, all decodes of it, and those that run.
PACKAGES = {
    "comfyui_workflow_templates_json": ("templates/*.json", "0.1.123", 253, 248),
    "comfyui_subgraph_blueprints": ("blueprints/*.json", "0.0.13", 77, 77),
}
DECODES = {"VAEDecode", "VAEDecodeTiled"}
#: The nodes that their VAEs come from -> the prefix of a VAE's tensors in their files.
LOADERS = {
    "VAELoader": "", "CheckpointLoaderSimple": "first_stage_model.", "ImageOnlyCheckpointLoader": "first_stage_model.",
}  # fmt: skip
#: Files of the decodes that do not run, and what is to be said of them.
LEFT = {
    "pixel_space": "no file: ComfyUI passes pixels on as they are",
    "hidream_o1_image_bf16.safetensors": "a model of pixels, without a VAE",
    "hidream_o1_image_dev_fp8_scaled.safetensors": "a model of pixels, without a VAE",
}
MUTED, BYPASSED = 2, 4
#: Numbers that stand for a subgraph's own inputs and outputs.
INPUTS, OUTPUTS = -10, -20


class Graph:
    """A workflow, or one use of a subgraph by the node `at` of the graph `outer`."""

    def __init__(self, data: dict, subgraphs: dict[str, dict], outer: Graph | None = None, at: dict | None = None):
        self.data, self.subgraphs, self.outer, self.at = data, subgraphs, outer, at
        self.nodes = {node["id"]: node for node in data["nodes"]}
        keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot")
        rows = [[link[k] for k in keys] if isinstance(link, dict) else link for link in data.get("links") or [] if link]
        self.links = {row[0]: row[1:5] for row in rows}

    def inside(self, node: dict) -> Graph:
        return Graph(self.subgraphs[node["type"]], self.subgraphs, self, node)

    def active(self) -> Iterator[tuple[Graph, dict]]:
        """All nodes that run, with the graph each is in."""
        for node in self.nodes.values():
            if node.get("mode", 0) not in (MUTED, BYPASSED):
                yield self, node
                if node["type"] in self.subgraphs:
                    yield from self.inside(node).active()

    def source(self, link: int | None) -> dict | None:
        """The node whose output a link is, behind reroutes, bypassed nodes and borders of subgraphs."""
        if link not in self.links:
            return None
        origin, slot = self.links[link][:2]
        if origin == INPUTS:
            name = self.data["inputs"][slot]["name"]
            return self.outer.source(next(i["link"] for i in self.at["inputs"] if i["name"] == name))
        node = self.nodes[origin]
        if node["type"] in self.subgraphs and node.get("mode", 0) != BYPASSED:
            inner = self.inside(node)
            return inner.source(next(key for key, (*_, to, at) in inner.links.items() if (to, at) == (OUTPUTS, slot)))
        if node["type"] == "Reroute" or node.get("mode", 0) == BYPASSED:
            kind = node["outputs"][slot]["type"]
            same = (i["link"] for i in node["inputs"] if i["link"] is not None and i["type"] in (kind, "*"))
            return self.source(next(same, None))
        return None if node.get("mode", 0) == MUTED else node


def decodes(path: Path) -> Iterator[tuple[str, str]]:
    """(kind of loader, its file) of each decode in a workflow."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or "nodes" not in data:  # an index of templates
        return
    subgraphs = {one["id"]: one for one in data.get("definitions", {}).get("subgraphs", [])}
    for graph, node in Graph(data, subgraphs).active():
        if node["type"] in DECODES:
            loader = graph.source(next(i["link"] for i in node["inputs"] if i["name"] == "vae"))
            yield loader["type"], loader["widgets_values"][0]


def found(package: str) -> list[tuple[str, str, str]]:
    """(workflow, kind of loader, its file) of each decode in a package of the version that was counted."""
    venv = Path(os.environ.get("COMFY_VENV") or Path.home() / ".cache" / "zerowaste-vae" / "venv")
    files, version, *_ = PACKAGES[package]
    for root in (*map(Path, sys.path), *venv.glob("lib/*/site-packages"), venv / "Lib" / "site-packages"):
        if (root / f"{package}-{version}.dist-info").is_dir():
            return [(path.stem, *each) for path in sorted((root / package).glob(files)) for each in decodes(path)]
    return []


FOUND = {package: found(package) for package in PACKAGES}
FILES = sorted({tuple(each) for rows in FOUND.values() for _, *each in rows})
NEEDED = ", ".join(f"{name} {version}" for name, (_, version, *_) in PACKAGES.items())
here = pytest.mark.skipif(not all(FOUND.values()), reason=f"needs ComfyUI's templates and blueprints: {NEEDED}")


@here
@pytest.mark.parametrize("package", PACKAGES)
def test_the_decodes_that_run_are_counted(package):
    """The rule by which the panel plans a file that nobody has read tells which family's VAE each holds."""
    *_, all_of_them, running = PACKAGES[package]
    left = Counter(file for _, _, file in FOUND[package] if by_file(file) is None)
    assert len(FOUND[package]) == all_of_them
    assert left.total() == all_of_them - running and left.keys() <= LEFT.keys(), left


@here
def test_all_that_is_left_is_named_with_its_reason():
    assert {file for _, file in FILES if by_file(file) is None} == LEFT.keys()


def test_the_count_is_the_one_in_the_docs():
    text = " ".join((Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8").split())
    for package, (_, version, all_of_them, running) in PACKAGES.items():
        assert f"{running} of {all_of_them}" in text and f"{package.replace('_', '-')} {version}" in text


@pytest.mark.parametrize(("loader", "file"), [each for each in FILES if "." in each[1]])
def test_a_file_of_that_family_is_taken(loader, file, tmp_path):
    """A small one with random weights, named and wrapped as the template's: the loader knows the family by its tensors,
    whatever its name; a whole checkpoint without a VAE is refused in a line."""
    architecture = by_file(file)
    path = tmp_path / "any.safetensors"
    content = {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(4, 4, 3, 3)} if LOADERS[loader] else {}
    if architecture is not None:
        checkpoint = small(architecture.name)
        content |= {LOADERS[loader] + name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}
        save_file(content, path, metadata={name: str(value) for name, value in checkpoint.metadata.items()})
        vae = load(path, device="cpu")
        assert vae.can_decode and vae.arch == architecture.name
    else:
        save_file(content, path)
        with pytest.raises(CheckpointError, match="a diffusion model without a VAE"):
            load(path, device="cpu")
