"""CogVideoX's VAE of the host's own class, of published widths (it knows no others): its own decode against ours, of
its file and of its object."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import cogvideox

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_the_stock_vae_is_known(comfy):
    """A clip of three latents, of which the network makes a piece of three and no more: nine frames."""
    path = comfy.base / "models" / "vae" / "cogvideox_vae.safetensors"
    save_file(random_checkpoint(architecture=cogvideox.ARCHITECTURE).tensors, path)
    z = torch.randn(1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, comfy.base / "input" / "cogvideox.latent")
    prompt = {
        "z": node("LoadLatent", latent="cogvideox.latent"),
        "theirs": node("VAELoader", vae_name=path.name),
        "ours": node("ZeroWasteVAELoader", vae_name=path.name),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=["z", 0], vae=["theirs", 0]),
        "plain": node("VAEDecode", samples=["z", 0], vae=["ours", 0]),
        "fast": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["optimised", 0]),
        "latent": node("VAEEncode", pixels=["stock", 0], vae=["theirs", 0]),
        "ours latent": node("ZeroWasteVAEEncode", pixels=["stock", 0], vae=["ours", 0]),
        "again": node("VAEDecode", samples=["latent", 0], vae=["ours", 0]),
        "ours again": node("VAEDecode", samples=["ours latent", 0], vae=["ours", 0]),
        "report": node("PreviewAny", source=["optimised", 1]),
    }
    names = ("stock", "plain", "fast", "again", "ours again")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="cogvideox") for n in names}
    run = comfy.run(prompt, timeout=500)
    path.unlink()
    assert run.status == "success", run.error
    clips = {n: comfy.images(run, f"save {n}").astype(int) for n in names}
    assert clips["stock"].shape == (9, 32, 32, 3) and clips["stock"].std() > 10
    for name, other in (("plain", "stock"), ("fast", "stock"), ("ours again", "again")):
        assert np.abs(clips[name] - clips[other]).max() <= 1, name
    assert ": cogvideox in" in run.outputs["report"]["text"][0]
