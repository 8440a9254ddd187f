"""Tiny VAEs of video of the host's own class, of published widths (it knows no others): its decode and encode against
ours, of a file and, where its latents need no scale, of its object."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families.taehv import ARCHITECTURE, LEAK, SCALE, SHIFT

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


@pytest.mark.parametrize(("name", "latents", "frames"), [
    ("taeh3", 7, 22), ("lighttaehy1_5", 3, 9), ("taeltx_2", 2, 9),
])  # fmt: skip
def test_the_stock_vae_is_known(comfy, name, latents, frames):
    """From models/vae_approx, for both loaders."""
    path = comfy.base / "models" / "vae_approx" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = ARCHITECTURE.published.sizes(path.name)
    drawn = random_checkpoint(config, architecture=ARCHITECTURE).tensors
    save_file({n: t for n, t in drawn.items() if n not in (SCALE, SHIFT, LEAK)}, path)
    z = torch.randn(1, config.latent_channels, latents, 3, 4, generator=torch.Generator().manual_seed(0))
    save_file({"latent_tensor": z, "latent_format_version_0": torch.tensor([])}, comfy.base / "input" / "tiny.latent")
    prompt = {
        "z": node("LoadLatent", latent="tiny.latent"),
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
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="tiny") for n in names}
    run = comfy.run(prompt, timeout=400)
    path.unlink()
    assert run.status == "success", run.error
    pictures = {n: comfy.images(run, f"save {n}").astype(int) for n in names}
    s = ARCHITECTURE.of(config).spatial
    assert pictures["stock"].shape == (frames, 3 * s, 4 * s, 3) and pictures["stock"].std() > 10
    for name, other in (("plain", "stock"), ("fast", "stock"), ("ours again", "again")):
        assert np.abs(pictures[name] - pictures[other]).max() <= 1, name
    assert (": taehv in" in run.outputs["report"]["text"][0]) == (config.latent_channels in (24, 128))
