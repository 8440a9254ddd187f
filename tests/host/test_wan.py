"""A Wan VAE of the host's own class: through its stock nodes and through the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import running
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.host

FILE = "tiny_wan21.safetensors"


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


@pytest.fixture(scope="module")
def wan(comfy, host_places):
    """The running host, with the file in its models/vae while these tests run."""
    path = comfy.base / "models" / "vae" / FILE
    running.write_tiny_wan(host_places, path)
    yield comfy
    path.unlink()


def latents(base: Path) -> dict:
    z = torch.randn(1, 16, 4, 5, 7, generator=torch.Generator().manual_seed(1))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, base / "input" / "wan.latent")
    return node("LoadLatent", latent="wan.latent")


def test_decodes_agree_with_the_stock_vae(wan):
    """The stock untiled decode against ours from the file, of the optimised stock VAE, and in tiles."""
    tiles = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
    z = ["z", 0]
    prompt = {
        "z": latents(wan.base),
        "theirs": node("VAELoader", vae_name=FILE),
        "ours": node("ZeroWasteVAELoader", vae_name=FILE),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=z, vae=["theirs", 0]),
        "plain": node("VAEDecode", samples=z, vae=["ours", 0]),
        "tiled": node("VAEDecodeTiled", samples=z, vae=["ours", 0], **tiles),
        "fast": node("VAEDecode", samples=z, vae=["optimised", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=z, vae=["ours", 0], chunk=1),
        "report": node("PreviewAny", source=["optimised", 1]),
        "how": node("PreviewAny", source=["decode", 1]),
    }
    names = ("stock", "plain", "tiled", "fast", "decode")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="wan") for n in names}
    run = wan.run(prompt)
    assert run.status == "success", run.error
    frames = {n: wan.images(run, f"save {n}").astype(int) for n in names}
    assert frames["stock"].shape == (13, 40, 56, 3)
    assert frames["stock"].std() > 20
    for name in names[1:]:
        assert np.abs(frames[name] - frames["stock"]).max() <= 1, name
    assert "wan2.1" in run.outputs["report"]["text"][0]
    assert "decode 13 frames of 56x40" in run.outputs["how"]["text"][0]


def test_8_bit_from_the_file_and_of_the_stock_vae(wan):
    """Both nodes that name a precision give the same frames, close to the exact ones."""
    z = ["z", 0]
    prompt = {
        "z": latents(wan.base),
        "theirs": node("VAELoader", vae_name=FILE),
        "exact": node("VAEDecode", samples=z, vae=["theirs", 0]),
        "ours": node("ZeroWasteVAELoader", vae_name=FILE, precision="int8"),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0], precision="int8"),
        "loaded": node("ZeroWasteVAEDecode", samples=z, vae=["ours", 0]),
        "fast": node("VAEDecode", samples=z, vae=["optimised", 0]),
        "how": node("PreviewAny", source=["loaded", 1]),
        "report": node("PreviewAny", source=["optimised", 1]),
    }
    names = ("exact", "loaded", "fast")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="wan8") for n in names}
    run = wan.run(prompt)
    assert run.status == "success", run.error
    exact, loaded, fast = (wan.images(run, f"save {n}").astype(int) for n in names)
    assert np.array_equal(loaded, fast)
    assert 0.1 < np.abs(loaded - exact).mean() < 10
    how = run.outputs["how"]["text"][0]
    assert "convolutions in int8" in how
    assert "wan2.1 in int8" in run.outputs["report"]["text"][0]


def test_encodes_agree_with_the_stock_vae(wan):
    """Six frames of 61x45: the host cuts off what fills no latent, at both sides, and so do we under its own nodes."""
    prompt = {
        "video": node("LoadVideo", file="clip.mp4"),
        "clip": node("GetVideoComponents", video=["video", 0]),
        "cut": node("ImageFromBatch", image=["clip", 0], batch_index=0, length=6),
        "crop": node("ImageCrop", image=["cut", 0], width=61, height=45, x=0, y=0),
        "theirs": node("VAELoader", vae_name=FILE),
        "ours": node("ZeroWasteVAELoader", vae_name=FILE),
        "stock": node("VAEEncode", pixels=["crop", 0], vae=["theirs", 0]),
        "plain": node("VAEEncode", pixels=["crop", 0], vae=["ours", 0]),
        "encode": node("ZeroWasteVAEEncode", pixels=["crop", 0], vae=["ours", 0]),
        "back": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["ours", 0]),
        "save back": node("SaveImage", images=["back", 0], filename_prefix="wan-back"),
    }
    prompt |= {f"save {n}": node("SaveLatent", samples=[n, 0], filename_prefix=f"wan-{n}") for n in ("stock", "plain")}
    run = wan.run(prompt)
    assert run.status == "success", run.error
    stock, plain = (
        load_file(next((wan.base / "output").glob(f"wan-{n}_*.latent")))["latent_tensor"] for n in ("stock", "plain")
    )
    assert stock.shape == (1, 16, 2, 5, 7)
    torch.testing.assert_close(plain, stock, rtol=0, atol=5e-4)
    assert wan.images(run, "save back").shape == (6, 45, 61, 3)


def test_our_nodes_take_the_stock_vae(wan):
    """Encode and Decode on what the stock VAELoader gives: as through Optimize, converted once for both."""
    prompt = {
        "clip": node("ZeroWasteVAEDemoClip", frames=5),
        "theirs": node("VAELoader", vae_name=FILE),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "encode": node("ZeroWasteVAEEncode", pixels=["clip", 0], vae=["theirs", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=["encode", 0], vae=["theirs", 0]),
        "through": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["optimised", 0]),
    }
    names = ("decode", "through", "stock")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="wan-any") for n in names}
    run = wan.run(prompt)
    assert run.status == "success", run.error
    decode, through, stock = (wan.images(run, f"save {n}") for n in names)
    assert np.array_equal(decode, through)
    assert np.abs(decode.astype(int) - stock).max() <= 1
    for name in ("encode", "decode"):
        assert "a copy of its weights" in run.outputs[name]["text"][0]
        assert run.outputs[name]["zerowaste"][0]["architecture"] == "wan2.1"
    assert "a copy of its weights" not in run.outputs["through"]["text"][0]
