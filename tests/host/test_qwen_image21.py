"""Qwen-Image 2.1's VAE in this host, which has no class of its own for it: our loader, stock nodes, transparency."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from zerowaste_vae import load
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import qwen_image21

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_our_loader_runs_it_behind_stock_nodes_too(comfy):
    """Two pictures with transparency, and what is encoded of them without it."""
    path = comfy.base / "models" / "vae" / "qwen_image_2.1_vae_bf16.safetensors"
    config = qwen_image21.Config((16, 16, 32, 32, 32), (16, 16, 32, 32, 32), 16)
    save_file(random_checkpoint(config, architecture=qwen_image21.ARCHITECTURE).tensors, path)
    z = torch.randn(2, 16, 3, 4, generator=torch.Generator().manual_seed(0))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, comfy.base / "input" / "qwen21.latent")
    prompt = {
        "z": node("LoadLatent", latent="qwen21.latent"),
        "vae": node("ZeroWasteVAELoader", vae_name=path.name),
        "ours": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0]),
        "stock": node("VAEDecode", samples=["z", 0], vae=["vae", 0]),
        "latent": node("ZeroWasteVAEEncode", pixels=["ours", 0], vae=["vae", 0]),
        "stock latent": node("VAEEncode", pixels=["ours", 0], vae=["vae", 0]),
        "again": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "stock again": node("VAEDecode", samples=["stock latent", 0], vae=["vae", 0]),
    }
    names = ("ours", "stock", "again", "stock again")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="qwen21") for n in names}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    expected = load(path, "fp32", "cpu").decode(z[:, :, None])[:, 0].mul(255).numpy()
    path.unlink()
    pictures = {n: colours(comfy, run, f"save {n}") for n in names}
    assert pictures["ours"].shape == (2, 48, 64, 4) and pictures["ours"].std() > 10
    assert np.abs(pictures["ours"] - expected).max() <= 1
    assert (pictures["stock"] == pictures["ours"]).all()
    assert np.abs(pictures["stock again"] - pictures["again"]).max() <= 1
    assert pictures["again"].std() > 10


def colours(comfy, run, name: str) -> np.ndarray:
    """All channels of what a SaveImage node wrote."""
    paths = [comfy.base / "output" / i["subfolder"] / i["filename"] for i in run.outputs[name]["images"]]
    return np.stack([np.asarray(Image.open(path)) for path in paths]).astype(int)
