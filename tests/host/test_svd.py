"""Stable Video Diffusion's VAE of the host's own class, of published widths (it knows no others): a batch is one clip,
by its own code, of its file and of its object."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import svd

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_a_batch_is_one_clip(comfy):
    path = comfy.base / "models" / "vae" / "svd_vae.safetensors"
    drawn = random_checkpoint(architecture=svd.ARCHITECTURE).tensors
    save_file({name: tensor.half() for name, tensor in drawn.items()}, path)
    z = torch.randn(3, 4, 4, 5, generator=torch.Generator().manual_seed(0))
    for name, frames in (("svd", z), ("svd_one", z[:1])):
        content = {"latent_tensor": frames.contiguous(), "latent_format_version_0": torch.tensor([])}
        save_file(content, comfy.base / "input" / f"{name}.latent")
    prompt = {
        "z": node("LoadLatent", latent="svd.latent"),
        "one": node("LoadLatent", latent="svd_one.latent"),
        "theirs": node("VAELoader", vae_name=path.name),
        "ours": node("ZeroWasteVAELoader", vae_name=path.name),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=["z", 0], vae=["theirs", 0]),
        "alone": node("VAEDecode", samples=["one", 0], vae=["theirs", 0]),
        "plain": node("VAEDecode", samples=["z", 0], vae=["ours", 0]),
        "fast": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["optimised", 0]),
        "latent": node("VAEEncode", pixels=["stock", 0], vae=["theirs", 0]),
        "ours latent": node("ZeroWasteVAEEncode", pixels=["stock", 0], vae=["theirs", 0]),
        "stock latent": node("VAEEncode", pixels=["stock", 0], vae=["ours", 0]),
        "again": node("VAEDecode", samples=["latent", 0], vae=["ours", 0]),
        "ours again": node("VAEDecode", samples=["ours latent", 0], vae=["ours", 0]),
        "stock again": node("VAEDecode", samples=["stock latent", 0], vae=["theirs", 0]),
        "compared": node("ZeroWasteVAECompare", samples=["z", 0], vae=["ours", 0]),
        "report": node("PreviewAny", source=["optimised", 1]),
        "found": node("PreviewAny", source=["compared", 2]),
    }
    names = ("stock", "alone", "plain", "fast", "again", "ours again", "stock again")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="svd") for n in names}
    run = comfy.run(prompt, timeout=500)
    path.unlink()
    assert run.status == "success", run.error
    clips = {n: comfy.images(run, f"save {n}").astype(int) for n in names}
    assert clips["stock"].shape == (3, 32, 40, 3) and clips["stock"].std() > 10
    assert np.abs(clips["stock"][:1] - clips["alone"]).max() > 1  # a frame depends on the others
    for name, other in (("plain", "stock"), ("fast", "stock"), ("ours again", "again"), ("stock again", "again")):
        assert np.abs(clips[name] - clips[other]).max() <= 1, name
    assert ": svd in" in run.outputs["report"]["text"][0]
    assert "ComfyUI" in run.outputs["found"]["text"][0]
