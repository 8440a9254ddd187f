"""Messages to a user: the list of the loader, errors, notes, and a log without mere plans."""

from __future__ import annotations

import time
import urllib.parse

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.families import kl

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def latent(comfy, *shape: int) -> dict:
    z = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, comfy.base / "input" / "words.latent")
    return node("LoadLatent", latent="words.latent")


def decode(comfy, vae: str = "tiny.safetensors", **widgets) -> dict:
    return {
        "z": latent(comfy, 1, 16, 2, 8, 8),
        "vae": node("ZeroWasteVAELoader", vae_name=vae),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], **widgets),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="words"),
    }


def test_the_loader_starts_with_a_vae_it_can_run(comfy):
    """Files of its networks first, of videos before those of pictures, then the demo, then what it cannot run."""
    picture = comfy.base / "models" / "vae" / "a_picture.safetensors"
    with torch.device("meta"):
        state = kl.FLUX.build(kl.Config(4 * (32,), 4 * (32,))).state_dict()
    save_file({name: torch.zeros(tensor.shape) for name, tensor in state.items()}, picture)
    for _ in range(50):  # until its header was read
        info = comfy.get("/object_info/ZeroWasteVAELoader")["ZeroWasteVAELoader"]
        kind, extra = info["input"]["required"]["vae_name"]
        options = kind if isinstance(kind, list) else extra["options"]
        if options.index(picture.name) < options.index("demo (small)"):
            break
        time.sleep(0.1)
    picture.unlink()
    assert options.index("tiny.safetensors") < options.index(picture.name) < options.index("demo (small)")
    # What other tests have saved is listed as well.
    assert options.index("demo (small)") < options.index("not_a_vae.safetensors")
    assert {"tiny.gguf", "tiny.safetensors"} <= set(options[:-2])


def test_an_error_has_the_packs_name_and_no_path(comfy):
    run = comfy.run(decode(comfy, vram_gb=0.001))
    assert run.status == "error"
    (data,) = (data for kind, data in run.events if kind == "execution_error")
    assert data["exception_type"] == "Zero-Waste VAE.PlanError"
    # A sentence, then the figures and the cure in the words of the node.
    assert data["exception_message"].startswith("This decode does not fit into its memory limit. ")
    assert "raise VRAM limit (vram_gb)" in data["exception_message"]


def test_bands_that_are_not_used_are_in_the_report(comfy):
    run = comfy.run(decode(comfy, **{"tiling": "exact", "tiling.tile": 32}))
    assert run.status == "success", run.error
    assert "bands of 32 pixels were not used" in run.outputs["decode"]["text"][0]


def test_plans_that_nobody_runs_leave_the_log_alone(comfy):
    before = len(comfy.log())
    query = {"model": "tiny.gguf", "width": 96, "height": 80, "frames": 5, "tiling": "exact", "tile": 48}
    assert comfy.get(f"/zerowaste_vae/plan?{urllib.parse.urlencode(query)}")["fits"]
    assert "Zero-Waste" not in comfy.log()[before:]
    # The same wish in a run is worth a line, with the pack's own prefix.
    query = decode(comfy, **{"tiling": "exact", "tiling.tile": 48})
    query["z"] = latent(comfy, 1, 16, 2, 10, 12)
    assert comfy.run(query).status == "success"
    assert "[Zero-Waste VAE] tile=48 of exact tiles at 96x80 is not used" in comfy.log()[before:]


def test_a_suffix_in_the_name_is_not_doubled(comfy):
    prompt = {
        "vae": node("ZeroWasteVAELoader", vae_name="tiny.safetensors"),
        "save": node("ZeroWasteVAESave", vae=["vae", 0], filename_prefix="twice.safetensors", type="safetensors f16"),
    }
    assert comfy.run(prompt).status == "success"
    assert (comfy.base / "output" / "twice_00001_.safetensors").is_file()


def test_tiles_of_the_host(comfy):
    """A network the engine does not know, with tiles: the host's tiled decode, and no note that they were in vain."""
    run = comfy.run(
        {
            "image": node("EmptyImage", width=64, height=48, batch_size=1, color=0x336699),
            "vae": node("VAELoader", vae_name="pixel_space"),
            "encode": node("VAEEncode", pixels=["image", 0], vae=["vae", 0]),
            "decode": node(
                "ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0],
                **{"tiling": "blended", "tiling.tile": 32, "tiling.overlap": 8},
            ),
            "save": node("SaveImage", images=["decode", 0], filename_prefix="tiles"),
        }
    )  # fmt: skip
    assert run.status == "success", run.error
    text = run.outputs["decode"]["text"][0]
    assert "in its own tiles of 32 pixels" in text and "without effect" not in text
    assert np.allclose(comfy.images(run, "save")[0, 20, 20], (0x33, 0x66, 0x99), atol=1)


def test_a_comparison_needs_a_network_of_the_hosts(comfy):
    """The tiny VAE's widths are none that ComfyUI's own SeedVR2 network has."""
    prompt = decode(comfy)
    prompt["compare"] = node("ZeroWasteVAECompare", samples=["z", 0], vae=["vae", 0])
    run = comfy.run(prompt)
    assert run.status == "error"
    assert "this ComfyUI has no network of its own for this VAE" in run.error
