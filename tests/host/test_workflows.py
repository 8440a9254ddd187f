"""Every example workflow on real hosts: those that need no diffusion weights run, the others are checked."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import zerowaste_vae
from graphs import to_prompt
from running import write_tiny_wan

pytestmark = pytest.mark.host

WORKFLOWS = {p.stem: p for p in sorted((Path(__file__).resolve().parents[2] / "workflows").glob("*.json"))}
#: Workflows that need weights, and the nodes which name their files.
CHECKED = {
    "SeedVR2 - upscale a video": ("VAELoader", "UNETLoader", "LoadVideo"),
    "Wan 2.1 - text to video": ("VAELoader", "UNETLoader", "CLIPLoader"),
    "Qwen-Image - text to image": ("VAELoader", "UNETLoader", "CLIPLoader"),
    "Flux.1 - text to image": ("VAELoader", "UNETLoader", "DualCLIPLoader"),
    "LTX-Video - text to video": ("CheckpointLoaderSimple", "CLIPLoader"),
    "LTX-2.5 - text to video": ("VAELoader", "UNETLoader", "CLIPLoader", "LatentUpscaleModelLoader"),
    "MiniMax H3 - text to video": ("VAELoader", "UNETLoader", "CLIPLoader"),
    "Compare with ComfyUI": ("VAELoader",),
}
RUNNABLE = sorted(WORKFLOWS.keys() - CHECKED.keys())
LOADERS = {
    "VAELoader": "vae", "UNETLoader": "diffusion_models", "CLIPLoader": "text_encoders",
    "DualCLIPLoader": "text_encoders", "CheckpointLoaderSimple": "checkpoints",
    "LatentUpscaleModelLoader": "latent_upscale_models",
}  # fmt: skip
#: Whose files ComfyUI's own templates name.
OWNERS = ("Comfy-Org", "comfyanonymous", "Lightricks")


def prompt_of(name: str, comfy, frames: int = 1) -> dict:
    """The prompt the frontend would queue, with so few frames that a CPU is done soon."""
    prompt = to_prompt(json.loads(WORKFLOWS[name].read_text()), comfy.get("/object_info"))
    for node in prompt.values():
        if node["class_type"] == "ZeroWasteVAEDemoClip":
            node["inputs"]["frames"] = frames
        if node["class_type"] == "RepeatImageBatch":
            node["inputs"]["amount"] = 1
        if node["class_type"] == "ZeroWasteVAEDecode":
            # Another value for each: the host takes equal nodes of two prompts for one, and forgets its ui output.
            node["inputs"]["chunk"] = 1 + RUNNABLE.index(name) if name in RUNNABLE else 0
    return prompt


def the(prompt: dict, kind: str) -> str:
    (found,) = (name for name, node in prompt.items() if node["class_type"] == kind)
    return found


@pytest.mark.parametrize("host", ["comfy", "old_comfy"])
@pytest.mark.parametrize("name", RUNNABLE)
def test_it_runs(name, host, request):
    comfy = request.getfixturevalue(host)
    prompt = prompt_of(name, comfy)
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    facts = run.outputs[the(prompt, "ZeroWasteVAEDecode")]["zerowaste"][0]
    assert facts["complete"]
    assert facts["clip"] == {"batch": 1, "frames": 1, "height": 176, "width": 288}


def test_the_comparison_is_with_the_hosts_own_network(comfy, host_places):
    """A small VAE of the host's own Wan class stands for the published file."""
    prompt = prompt_of("Compare with ComfyUI", comfy)
    path = comfy.base / "models" / "vae" / prompt[the(prompt, "VAELoader")]["inputs"]["vae_name"]
    write_tiny_wan(host_places, path)
    run = comfy.run(prompt)
    path.unlink()
    assert run.status == "success", run.error
    difference = comfy.images(run, the(prompt, "SaveImage"))
    assert difference.shape == (1, 176, 288, 3)
    assert difference.max() <= 1
    facts = run.outputs[the(prompt, "ZeroWasteVAECompare")]["zerowaste"][0]
    assert facts["theirs"]["mode"] == "VAE Decode" and facts["theirs"]["ms"] > 0 and facts["ours"]["ms"] > 0
    assert facts["comparison"]["psnr"] > 60 and facts["comparison"]["max_error"] > 0
    assert "Seams: none possible, the frames are whole" in facts["lines"]


def test_files_of_the_templates_can_be_downloaded():
    """With the names and addresses that ComfyUI's own templates have."""
    for name, path in WORKFLOWS.items():
        for node in json.loads(path.read_text())["nodes"]:
            if node["type"] not in LOADERS:
                continue
            models = node["properties"]["models"]
            files = [value for value in node["widgets_values"] if value.endswith(".safetensors")]
            assert [model["name"] for model in models] == files and files, name
            for model in models:
                owner = model["url"].removeprefix("https://huggingface.co/").partition("/")[0]
                assert owner in OWNERS and model["url"].endswith(f"/{model['name']}"), name
                assert model["directory"] == LOADERS[node["type"]]


def test_nodes_of_the_templates_name_their_packs_and_versions():
    for path in WORKFLOWS.values():
        for node in json.loads(path.read_text())["nodes"]:
            if node["type"] == "MarkdownNote":
                continue
            ours = node["type"].startswith("ZeroWaste")
            assert node["properties"]["cnr_id"] == ("zerowaste-vae" if ours else "comfy-core")
            assert node["properties"]["ver"] == (zerowaste_vae.__version__ if ours else "0.33.0")


def test_long_video_keeps_its_target(comfy):
    """The plan of the long video keeps its target."""
    prompt = prompt_of("Long video within 1 GB", comfy)
    decode = the(prompt, "ZeroWasteVAEDecode")
    run = comfy.run(prompt)
    plan = run.outputs[decode]["zerowaste"][0]["plan_facts"]
    assert plan["target_gb"] == prompt[decode]["inputs"]["vram_gb"] == 1
    assert plan["predicted_gb"] <= 1


@pytest.mark.parametrize("name", CHECKED)
def test_workflow_names_nodes_and_widgets_of_this_host(name, comfy):
    """Its weights are not here, so the host refuses it: for the missing files and nothing else."""
    prompt = prompt_of(name, comfy)
    refused = comfy.run(prompt)
    assert refused.status == "invalid"
    errors = json.loads(refused.error)["node_errors"]
    assert set(errors) <= {number for number, node in prompt.items() if node["class_type"] in CHECKED[name]}
    assert {e["extra_info"]["input_name"] for n in errors.values() for e in n["errors"]} <= {
        "vae_name", "unet_name", "clip_name", "clip_name1", "clip_name2", "ckpt_name", "file",
        "model_name",
    }  # fmt: skip


def test_thumbnails_are_served_beside_the_workflows(comfy):
    offered = comfy.get("/workflow_templates")["ComfyUI-ZeroWasteVAE"]
    assert set(offered) == WORKFLOWS.keys()
    for name in offered:
        picture = comfy.bytes(f"/api/workflow_templates/ComfyUI-ZeroWasteVAE/{quote(name)}.jpg")
        assert picture[:3] == b"\xff\xd8\xff"
        assert len(picture) < 300_000


def test_values_saved_before_a_widget_was_added_still_load(comfy):
    """Workflows of the first version: fewer values per node, nested ones in between."""
    nodes = comfy.get("/object_info")
    old = {
        "ZeroWasteVAELoader": ["demo (small)", "fp32", 0, 0],
        "ZeroWasteVAEOptimize": ["auto", 0, 1, "blended", 64, 16],
        "ZeroWasteVAEDecode": [0, 1, "blended", 48, 16],
        "ZeroWasteVAEEncode": [0, "auto"],
    }
    workflow = {"links": [], "nodes": []}
    for number, (kind, values) in enumerate(old.items()):
        workflow["nodes"].append({"id": number, "type": kind, "inputs": [], "widgets_values": values})
    loader, optimize, decode, encode = (n["inputs"] for n in to_prompt(workflow, nodes).values())
    assert loader == {"vae_name": "demo (small)", "precision": "fp32", "vram_gb": 0, "norm_groups": 0, "optimise": True}
    assert (optimize["tiling"], optimize["tiling.tile"], optimize["tiling.overlap"]) == ("blended", 64, 16)
    assert (optimize["min_db"], optimize["fp8"], optimize["triton_fusion"]) == (0, False, True)
    assert decode == {
        "vram_gb": 0, "chunk": 1, "tiling": "blended", "tiling.tile": 48, "tiling.overlap": 16, "output": "auto",
        "ram_gb": 0, "gpus": "auto", "any_vae": False, "keep_models": "auto", "draft": False,
    }  # fmt: skip
    assert encode == {
        "vram_gb": 0, "tiling": "auto", "chunk": 0, "ram_gb": 0, "gpus": "auto", "encode_as": "Auto",
        "keep_models": "auto",
    }  # fmt: skip


def test_images_of_a_run_are_files_that_open(comfy):
    prompt = prompt_of("Try it - demo clip", comfy)
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    frames = comfy.images(run, the(prompt, "SaveImage"))
    assert frames.shape == (1, 176, 288, 3)
    assert np.ptp(frames) > 100
