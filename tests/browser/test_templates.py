"""The pack's workflows in the real frontend, and those that its first version saved."""

from __future__ import annotations

import json

import pytest
from graphs import NOTES, to_prompt
from pages import SAVED, STATES, WORKFLOWS, opened, workflow
from PIL import Image

pytestmark = pytest.mark.host

NAMING_FILES = {
    "VAELoader", "UNETLoader", "CLIPLoader", "DualCLIPLoader", "CheckpointLoaderSimple", "LoadVideo", "LoadImage",
    "LatentUpscaleModelLoader", "ZeroWasteVAELoader",
}  # fmt: skip
#: Width and height of the frames of this pack's pictures, which the page has as blobs.
PICTURES = """
[...document.querySelectorAll('[role=dialog] img')].filter((e) => e.naturalWidth === 480).map((e) => {
  const frame = e.closest('.aspect-square') ?? e.parentElement;
  return [frame.clientWidth, frame.clientHeight];
})"""

#: Shows this pack's templates alone.
OURS = """void [...document.querySelectorAll('[role=dialog] *')]
  .find((e) => !e.children.length && e.textContent.trim() === 'Zero-Waste VAE')?.click()"""


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_workflow_opens_with_all_its_nodes(browser, comfy, shots, name, renderer):
    opened(browser, comfy, renderer)
    nodes = browser("load", workflow=workflow(name))
    saved = workflow(name)["nodes"]
    assert {n["id"]: n["type"] for n in nodes} == {str(n["id"]): n["type"] for n in saved}
    assert [n["type"] for n in nodes if not n["known"] and n["type"] not in NOTES] == []
    # The models that some workflows need are not here: those nodes alone are marked.
    assert {n["type"] for n in nodes if n["errors"]} <= NAMING_FILES
    # What the frontend would queue is what the host tests run.
    expected = to_prompt(workflow(name), comfy.get("/object_info"))
    prompt = browser("prompt")
    ours = {key: n["inputs"] for key, n in prompt.items() if n["class_type"].startswith("ZeroWaste")}
    assert ours == {key: n["inputs"] for key, n in expected.items() if n["class_type"].startswith("ZeroWaste")}
    # Nothing covers anything else.
    boxes = [(n["id"], *n["pos"], *n["size"]) for n in nodes]
    for index, (a, x, y, w, h) in enumerate(boxes):
        for b, x2, y2, w2, h2 in boxes[index + 1 :]:
            apart = x + w <= x2 or x2 + w2 <= x or y + h <= y2 - 30 or y2 + h2 <= y - 30
            assert apart, f"node {a} and node {b} overlap"
    browser("view", file=str(shots / f"template-{name.replace(' ', '_')}-{renderer}.png"))


@pytest.mark.parametrize("name", sorted(SAVED))
def test_workflows_of_the_first_version_load_with_their_values(browser, comfy, name):
    opened(browser, comfy)
    saved = json.loads(SAVED[name].read_text())
    browser("load", workflow=saved)
    prompt = browser("prompt")
    # In the order of the widgets as they were then; values that it did not save are the defaults of then.
    widgets = {
        "ZeroWasteVAELoader": {"vae_name": None, "precision": "auto", "vram_gb": 0, "norm_groups": 0, "optimise": True},
        "ZeroWasteVAEOptimize": {"precision": "auto", "vram_gb": 0, "chunk": 0, "tiling": "auto"},
        "ZeroWasteVAEEncode": {"vram_gb": 0, "tiling": "auto", "chunk": 0, "ram_gb": 0},
        "ZeroWasteVAEDecode": {"vram_gb": 0, "chunk": 0, "tiling": "auto", "output": "auto", "ram_gb": 0},
        "ZeroWasteVAEDemoClip": {"frames": 9},
    }
    seen = 0
    for entry in saved["nodes"]:
        if entry["type"] not in widgets:
            continue
        values = dict(widgets[entry["type"]])
        values |= dict(zip(values, entry["widgets_values"], strict=False))
        inputs = prompt[str(entry["id"])]["inputs"]
        assert {key: inputs[key] for key in values} == values
        seen += 1
    assert seen


#: State -> widgets that came after it, with what they are then.
LATER = {
    "with_encode_as": {(f"ZeroWasteVAE{kind}", "keep_models"): "auto" for kind in ("Decode", "Encode", "Optimize")}
    | {("ZeroWasteVAEOptimize", "direct"): False, ("ZeroWasteVAEDecode", "draft"): False},
}
LATER["with_gpus"] = LATER["with_encode_as"] | {
    ("ZeroWasteVAEDecodeToVideo", "gpus"): "auto", ("ZeroWasteVAEOptimize", "kernels"): "auto",
    ("ZeroWasteVAEDecode", "any_vae"): False, ("ZeroWasteVAEDecodeToVideo", "any_vae"): False,
    ("ZeroWasteVAEEncode", "encode_as"): "Auto",
}  # fmt: skip
LATER["before_gpus"] = LATER["with_gpus"] | {
    ("ZeroWasteVAEDecode", "gpus"): "auto", ("ZeroWasteVAEEncode", "gpus"): "auto",
    ("ZeroWasteVAEOptimize", "winograd"): False,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(STATES))
def test_workflows_of_later_states_load_with_their_values(browser, comfy, name):
    """Every node with every widget set, tiles within a choice among them; widgets that came since are at defaults."""
    opened(browser, comfy)
    saved = json.loads(STATES[name].read_text())
    browser("load", workflow=saved["workflow"])
    prompt = browser("prompt")
    added = {}
    for number, was in saved["prompt"].items():
        now = prompt[number]
        assert now["class_type"] == was["class_type"]
        assert {key: now["inputs"].get(key) for key in was["inputs"]} == was["inputs"], was["class_type"]
        for key in now["inputs"].keys() - was["inputs"].keys():
            added[was["class_type"], key] = now["inputs"][key]
    assert added == LATER[name]


def test_every_template_has_a_picture():
    """Square, as the templates dialog shows them."""
    pictures = {name: Image.open(path.with_suffix(".jpg")) for name, path in WORKFLOWS.items()}
    assert {picture.size for picture in pictures.values()} == {(480, 480)}
    assert len({picture.tobytes() for picture in pictures.values()}) == len(WORKFLOWS)


@pytest.mark.parametrize("host", ["comfy", "new_comfy"])
def test_the_templates_are_under_the_packs_own_name(browser, request, shots, host):
    """And not under that of its folder; the one that needs no model comes first."""
    opened(browser, request.getfixturevalue(host))
    browser("js", source="void app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    dialog = "[...document.querySelectorAll('[role=dialog]')].map((e) => e.innerText).join()"
    for _ in range(60):
        text = browser("js", source=dialog)
        if "Zero-Waste VAE" in text and "Try it" in text:
            break
        browser("js", source=OURS)
        browser("js", source="new Promise((done) => setTimeout(done, 500))")
    browser("js", source="new Promise((done) => setTimeout(done, 2500))")  # for the pictures
    browser("view", file=str(shots / f"templates-dialog-{host}.png"))
    shapes = browser("js", source=PICTURES)
    browser("key", keys="Escape")
    assert "Zero-Waste VAE" in text and "ComfyUI-ZeroWasteVAE" not in text
    listed = sorted(WORKFLOWS, key=lambda name: (not name.startswith("Try it"), name.casefold()))
    assert listed == sorted(WORKFLOWS, key=text.index)
    assert len(shapes) == len(WORKFLOWS)
    assert all(abs(width - height) <= 2 for width, height in shapes), shapes
