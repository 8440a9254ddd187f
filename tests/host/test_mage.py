"""Mage-VAE of the host's own class, of published widths (it knows no others): its own decode against ours, of its file
and of its object."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import mage

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_the_stock_vae_is_known(comfy):
    path = comfy.base / "models" / "vae" / "mage_flow_vae_bf16.safetensors"
    prefixes = {"encoder": "student.dconv_encoder", "decoder": "pipeline"}
    drawn = random_checkpoint(architecture=mage.ARCHITECTURE).tensors
    halves = ((name.partition("."), tensor) for name, tensor in drawn.items())
    save_file({f"{prefixes[half]}.{rest}": tensor for (half, _, rest), tensor in halves}, path)
    z = torch.randn(1, 128, 3, 4, generator=torch.Generator().manual_seed(0))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, comfy.base / "input" / "mage.latent")
    prompt = {
        "z": node("LoadLatent", latent="mage.latent"),
        "theirs": node("VAELoader", vae_name=path.name),
        "ours": node("ZeroWasteVAELoader", vae_name=path.name),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=["z", 0], vae=["theirs", 0]),
        "plain": node("VAEDecode", samples=["z", 0], vae=["ours", 0]),
        "fast": node("VAEDecode", samples=["z", 0], vae=["optimised", 0]),
        "latent": node("VAEEncode", pixels=["stock", 0], vae=["theirs", 0]),
        "ours latent": node("VAEEncode", pixels=["stock", 0], vae=["ours", 0]),
        "again": node("VAEDecode", samples=["latent", 0], vae=["ours", 0]),
        "ours again": node("VAEDecode", samples=["ours latent", 0], vae=["ours", 0]),
        "report": node("PreviewAny", source=["optimised", 1]),
    }
    names = ("stock", "plain", "fast", "again", "ours again")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="mage") for n in names}
    run = comfy.run(prompt, timeout=400)
    path.unlink()
    assert run.status == "success", run.error
    pictures = {n: comfy.images(run, f"save {n}").astype(int) for n in names}
    assert pictures["stock"].shape == (1, 48, 64, 3) and pictures["stock"].std() > 10
    for name, other in (("plain", "stock"), ("fast", "stock"), ("ours again", "again")):
        assert np.abs(pictures[name] - pictures[other]).max() <= 1, name
    assert ": mage in" in run.outputs["report"]["text"][0]
