"""Image VAEs of the host's own classes: through its stock nodes and through the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.families import kl

pytestmark = pytest.mark.host

#: The host knows one encoder, and decoders of any width.
WIDTHS = (128, 256, 512, 512), (32, 64, 128, 128)
FAMILIES = {
    "flux": (kl.FLUX, kl.Config(*WIDTHS)),
    "sd": (kl.SD, kl.Config(*WIDTHS, 4, 4, quantised=True)),
    "flux2": (kl.FLUX2, kl.Config(*WIDTHS, 32, 32, quantised=True)),
}


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def write(family: str, path: Path) -> None:
    architecture, config = FAMILIES[family]
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        state = architecture.build(config).state_dict()
    weights = {}
    for name, p in sorted(state.items()):
        noise = torch.randn(p.shape, generator=generator)
        if name == "bn.running_var":
            weights[name] = 1 + noise.square()
        elif "norm" in name and name.endswith("weight"):
            weights[name] = 1 + 0.1 * noise
        else:
            weights[name] = (noise * (p[0].numel() ** -0.5 if p.ndim > 1 else 0.1)).half()
    save_file(weights, path)


@pytest.fixture(scope="module", params=FAMILIES)
def host(comfy, request):
    """(running host with the file in its models/vae, the file's name, (channels, pixels) of a latent pixel)"""
    file = f"tiny_{request.param}.safetensors"
    path = comfy.base / "models" / "vae" / file
    write(request.param, path)
    yield comfy, file, {"flux": (16, 8), "sd": (4, 8), "flux2": (128, 16)}[request.param]
    path.unlink()


def latents(base: Path, channels: int, side: int) -> dict:
    """Two pictures of about 48x80."""
    z = torch.randn(2, channels, 48 // side, 80 // side, generator=torch.Generator().manual_seed(1))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, base / "input" / "pictures.latent")
    return node("LoadLatent", latent="pictures.latent")


def test_decodes_agree_with_the_stock_vae(host):
    """The stock untiled decode against ours from the file, of the optimised and of the bare stock VAE, and in tiles."""
    comfy, file, (channels, side) = host
    z = ["z", 0]
    tiles = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
    prompt = {
        "z": latents(comfy.base, channels, side),
        "theirs": node("VAELoader", vae_name=file),
        "ours": node("ZeroWasteVAELoader", vae_name=file),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=z, vae=["theirs", 0]),
        "plain": node("VAEDecode", samples=z, vae=["ours", 0]),
        "tiled": node("VAEDecodeTiled", samples=z, vae=["ours", 0], **tiles),
        "fast": node("VAEDecode", samples=z, vae=["optimised", 0]),
        "bare": node("ZeroWasteVAEDecode", samples=z, vae=["theirs", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=z, vae=["ours", 0], chunk=1),
        "report": node("PreviewAny", source=["optimised", 1]),
        "how": node("PreviewAny", source=["decode", 1]),
    }
    names = ("stock", "plain", "tiled", "fast", "bare", "decode")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="kl") for n in names}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    pictures = {n: comfy.images(run, f"save {n}").astype(int) for n in names}
    assert pictures["stock"].shape == (2, 48, 80, 3)
    assert pictures["stock"].std() > 20
    for name in names[1:]:
        assert np.abs(pictures[name] - pictures["stock"]).max() <= 1, name
    family = file.removeprefix("tiny_").removesuffix(".safetensors")
    assert f": {family} in" in run.outputs["report"]["text"][0]
    assert "of 80x48" in run.outputs["how"]["text"][0]


def test_encodes_agree_with_the_stock_vae(host):
    """Two pictures of 61x45: the host cuts off what fills no latent, at both sides, and so do we under its own nodes;
    our own pads them and cuts that off again."""
    comfy, file, (channels, side) = host
    prompt = {
        "video": node("LoadVideo", file="clip.mp4"),
        "clip": node("GetVideoComponents", video=["video", 0]),
        "cut": node("ImageFromBatch", image=["clip", 0], batch_index=0, length=2),
        "crop": node("ImageCrop", image=["cut", 0], width=61, height=45, x=0, y=0),
        "theirs": node("VAELoader", vae_name=file),
        "ours": node("ZeroWasteVAELoader", vae_name=file),
        "stock": node("VAEEncode", pixels=["crop", 0], vae=["theirs", 0]),
        "plain": node("VAEEncode", pixels=["crop", 0], vae=["ours", 0]),
        "encode": node("ZeroWasteVAEEncode", pixels=["crop", 0], vae=["ours", 0]),
        "back": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["ours", 0]),
        "save back": node("SaveImage", images=["back", 0], filename_prefix="kl-back"),
    }
    names = ("stock", "plain", "encode")
    prompt |= {f"save {n}": node("SaveLatent", samples=[n, 0], filename_prefix=f"kl-{file}-{n}") for n in names}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    stock, plain, own = (
        load_file(next((comfy.base / "output").glob(f"kl-{file}-{n}_*.latent")))["latent_tensor"] for n in names
    )
    assert stock.shape == (2, channels, 45 // side, 61 // side)
    assert own.shape == (2, channels, -(-45 // side), -(-61 // side))
    torch.testing.assert_close(plain, stock, rtol=0, atol=1e-3)
    assert comfy.images(run, "save back").shape == (2, 45, 61, 3)


def test_frames_of_a_video_are_pictures(host):
    """The size fills no latents, and the decode comes back to it; past the video's end there are no pictures."""
    comfy, file, _ = host
    clip = torch.rand(2, 46, 62, 3, generator=torch.Generator().manual_seed(2))
    write_mp4(comfy.base / "input" / "odd.mp4", clip, 8, crf=0)
    prompt = {
        "video": node("LoadVideo", file="odd.mp4"),
        "vae": node("ZeroWasteVAELoader", vae_name=file),
        "encode": node("ZeroWasteVAEEncodeFromVideo", video=["video", 0], vae=["vae", 0], start=0, frames=0),
        "back": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["back", 0], filename_prefix="kl-video"),
    }
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    assert comfy.images(run, "save").shape == (2, 46, 62, 3)
    prompt["encode"]["inputs"]["start"] = 40
    run = comfy.run(prompt)
    assert run.status == "error" and "has no frames there" in run.error


def test_a_video_latent_is_refused_in_our_words(host):
    comfy, file, (channels, _) = host
    z = torch.zeros(1, channels + 1, 2, 4, 4)
    save_file({"latent_tensor": z, "latent_format_version_0": torch.tensor([])}, comfy.base / "input" / "odd.latent")
    run = comfy.run({
        "z": node("LoadLatent", latent="odd.latent"),
        "vae": node("ZeroWasteVAELoader", vae_name=file),
        "decode": node("VAEDecode", samples=["z", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="kl"),
    })  # fmt: skip
    assert run.status == "error"
    assert f"decodes latents [B, {channels}, h, w]" in run.error
