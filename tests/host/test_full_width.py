"""The published widths (250 M parameters, seeded) beside the host's own SeedVR2 VAE."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine.families.seedvr2 import Config

pytestmark = pytest.mark.host

WIDTHS = (128, 256, 512, 512)


@pytest.fixture(scope="module")
def full_width(comfy, random_weights):
    """A file of models/vae that the stock VAELoader and ours both know."""
    if "SeedVR2Preprocess" not in comfy.get("/object_info"):
        pytest.skip("this ComfyUI has no SeedVR2 VAE of its own")
    path = comfy.base / "models" / "vae" / "full_width.safetensors"
    save_file(random_weights(Config(WIDTHS, WIDTHS)), path)
    yield path
    path.unlink()


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def difference(a: np.ndarray, b: np.ndarray) -> int:
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def test_native_vae_and_ours_agree(comfy, full_width):
    """The stock VAELoader, ours, ours made from the stock VAE, and our node on the stock VAE decode the same frames."""
    z = torch.randn(1, 16, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, comfy.base / "input" / "full_width.latent")
    prompt = {
        "z": node("LoadLatent", latent="full_width.latent"),
        "native": node("VAELoader", vae_name=full_width.name),
        "ours": node("ZeroWasteVAELoader", vae_name=full_width.name),
        "optimized": node("ZeroWasteVAEOptimize", vae=["native", 0]),
        "decode native": node("VAEDecode", samples=["z", 0], vae=["native", 0]),
        "decode ours": node("VAEDecode", samples=["z", 0], vae=["ours", 0]),
        "decode optimized": node("VAEDecode", samples=["z", 0], vae=["optimized", 0]),
        "decode direct": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["native", 0]),
    }
    for name in ("native", "ours", "optimized", "direct"):
        prompt[f"save {name}"] = node("SaveImage", images=[f"decode {name}", 0], filename_prefix="test")
    run = comfy.run(prompt, timeout=400)
    assert run.status == "success", run.error
    native = comfy.images(run, "save native")
    assert native.shape == (5, 64, 64, 3)
    assert native.std() > 20
    assert difference(native, comfy.images(run, "save ours")) <= 1
    assert difference(native, comfy.images(run, "save optimized")) <= 1
    assert difference(native, comfy.images(run, "save direct")) <= 1


def test_native_vae_is_saved_with_all_its_weights(comfy, full_width):
    prompt = {
        "native": node("VAELoader", vae_name=full_width.name),
        "save": node("ZeroWasteVAESave", vae=["native", 0], filename_prefix="native", type="safetensors f16"),
    }
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    path = comfy.base / "output" / "native_00001_.safetensors"
    saved, source = load_file(path), load_file(full_width)
    with safe_open(path, "pt") as file:
        assert file.metadata()["norm_num_groups"] == "32"
    path.unlink()
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[key].half(), source[key]) for key in source)


def test_interrupted_save_leaves_nothing(comfy, full_width):
    """250 M weights in q4_k take far longer than the request to stop."""
    prompt = {
        "vae": node("ZeroWasteVAELoader", vae_name=full_width.name),
        "save": node("ZeroWasteVAESave", vae=["vae", 0], filename_prefix="stopped/vae", type="gguf q4_k"),
    }
    assert comfy.run(prompt, at="save", do=comfy.interrupt).status == "interrupted"
    assert list((comfy.base / "output" / "stopped").iterdir()) == []
