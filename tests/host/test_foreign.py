"""Zero-Waste VAE for WanVideo and for SeedVR2 in a real ComfyUI, beside stand-ins of those packs (other_packs): their
own nodes decode and encode on the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import running

pytestmark = pytest.mark.host
PACKS = Path(__file__).with_name("other_packs")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    others = [PACKS / name for name in ("wan_video", "seedvr2", "single_nodes")]
    with running.serving(tmp_path_factory.mktemp("foreign"), running.newest(), others=others) as server:
        running.write_tiny_wan(running.newest(), server.base / "models" / "vae" / "tiny_wan.safetensors")
        yield server


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def smaller(images: str) -> dict:
    return node("ImageScale", image=[images, 0], upscale_method="area", width=48, height=32, crop="disabled")


def shown(server, run, name: str) -> np.ndarray:
    return server.images(run, name).astype(int)


def test_wans_nodes_run_on_the_engine(host):
    """Frames encoded and decoded by the pack's own nodes, with its VAE and with ours, MultiGPU's tuple too."""
    tiles = {"enable_vae_tiling": True, "tile_x": 272, "tile_y": 272, "tile_stride_x": 144, "tile_stride_y": 128}
    prompt = {"clip": node("ZeroWasteVAEDemoClip", frames=5),
              "small": smaller("clip"),
              "load": node("WanVideoVAELoader", model_name="small", precision="fp32"),
              "load two": node("WanVideoVAELoaderMultiGPU", model_name="small", precision="fp32"),
              "ours": node("ZeroWasteVAEForWanVideo", vae=["load", 0], vram_gb=2.0),
              "ours two": node("ZeroWasteVAEForWanVideo", vae=["load two", 0]),
              "report": node("PreviewAny", source=["ours", 1])}  # fmt: skip
    for name, vae in (("stock", "load"), ("fast", "ours")):
        prompt[f"encode {name}"] = node("WanVideoEncode", vae=[vae, 0], image=["small", 0], enable_vae_tiling=False)
        prompt[f"decode {name}"] = node("WanVideoDecode", vae=[vae, 0], samples=[f"encode {name}", 0], **tiles)
    prompt["decode two"] = node("WanVideoDecodeMultiGPU", vae=["ours two", 0], samples=["encode stock", 0], **tiles)
    for name in ("stock", "fast", "two"):
        prompt[f"save {name}"] = node("SaveImage", images=[f"decode {name}", 0], filename_prefix=f"foreign-{name}")
    run = host.run(prompt)
    assert run.status == "success", run.error
    stock = shown(host, run, "save stock")
    assert stock.shape == (5, 32, 48, 3) and stock.std() > 10
    for name in ("fast", "two"):
        assert abs(shown(host, run, f"save {name}") - stock).max() <= 1  # rounding to 8 bits
    lines = run.outputs["report"]["text"][0]
    assert "wan2.1 in fp32 on cpu; tiling auto, at most 2 GB" in lines and "whole frames" in lines
    # The running node shows what our own nodes show.
    assert run.texts("decode fast")[-1].startswith("decode: done in ")


def test_a_small_decoder_is_passed_on(host):
    prompt = {"load": node("WanVideoTinyVAELoader", model_name="small"),
              "ours": node("ZeroWasteVAEForWanVideo", vae=["load", 0]),
              "z": node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1),
              "decode": node("WanVideoDecode", vae=["ours", 0], samples=["z", 0], enable_vae_tiling=False, tile_x=272,
                             tile_y=272, tile_stride_x=144, tile_stride_y=128),
              "save": node("SaveImage", images=["decode", 0], filename_prefix="tiny"),
              "report": node("PreviewAny", source=["ours", 1])}  # fmt: skip
    run = host.run(prompt)
    assert run.status == "success", run.error
    assert run.outputs["report"]["text"][0].endswith("TAEHV is no VAE of Wan's own kind")


def test_the_upscaler_runs_on_the_engine(host):
    """Its batches are those of our own nodes; a run that fails in its loop, and one after it."""
    prompt = {"clip": node("ZeroWasteVAEDemoClip", frames=5),
              "small": smaller("clip"),
              "load": node("SeedVR2LoadVAEModel", model="tiny.safetensors", device="cpu", cache_model=False,
                           encode_tiled=False, decode_tiled=True),
              "ours": node("ZeroWasteVAEForSeedVR2", vae=["load", 0]),
              "report": node("PreviewAny", source=["ours", 1]),
              "up": node("SeedVR2VideoUpscaler", image=["small", 0], vae=["ours", 0], batch_size=5, fails="between"),
              "save": node("SaveImage", images=["up", 0], filename_prefix="up")}  # fmt: skip
    failed = host.run(prompt)
    assert failed.status == "error" and "between" in failed.error
    prompt["up"]["inputs"]["fails"] = "never"
    prompt |= {"vae": node("ZeroWasteVAELoader", vae_name="tiny.safetensors"),
               "encode": node("ZeroWasteVAEEncode", pixels=["small", 0], vae=["vae", 0]),
               "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0]),
               "save ours": node("SaveImage", images=["decode", 0], filename_prefix="ours")}  # fmt: skip
    run = host.run(prompt)
    assert run.status == "success", run.error
    frames = shown(host, run, "save ours")
    assert frames.std() > 10 and abs(shown(host, run, "save") - frames).max() <= 1
    assert run.outputs["report"]["text"][0].startswith("tiny.safetensors: seedvr2 in fp32 on cpu")
    assert run.texts("up")[-1].startswith("decode: done in ")


def test_our_nodes_are_there_without_those_packs(comfy):
    """Saved workflows load: what is missing is theirs."""
    for name, kind in (("ZeroWasteVAEForWanVideo", "WANVAE"), ("ZeroWasteVAEForSeedVR2", "SEEDVR2_VAE")):
        there = comfy.get(f"/object_info/{name}")[name]
        assert there["input"]["required"]["vae"][0] == kind and there["output"][0] == kind
    prompt = {"load": node("WanVideoVAELoader", model_name="small", precision="fp32"),
              "ours": node("ZeroWasteVAEForWanVideo", vae=["load", 0]),
              "report": node("PreviewAny", source=["ours", 1])}  # fmt: skip
    refused = comfy.run(prompt)
    assert refused.status == "invalid" and "WanVideoVAELoader" in refused.error


@pytest.mark.parametrize(("kind", "pack"), [
    ("HyVideoVAELoader", "HunyuanVideoWrapper"), ("CogVideoXVAELoader", "CogVideoXWrapper"),
])  # fmt: skip
def test_objects_that_only_their_pack_can_use_are_named(host, kind, pack):
    """They fit ComfyUI's socket; decode, encode and Optimize say whose they are, and what helps."""
    z, images = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1), node(
        "ZeroWasteVAEDemoClip", frames=1)  # fmt: skip
    for name, inputs in (("ZeroWasteVAEDecode", {"samples": ["z", 0]}), ("ZeroWasteVAEOptimize", {}),
                         ("ZeroWasteVAEEncode", {"pixels": ["images", 0]})):  # fmt: skip
        prompt = {"z": z, "images": images, "load": node(kind), "ours": node(name, vae=["load", 0], **inputs),
                  "report": node("PreviewAny", source=["ours", 1])}  # fmt: skip
        run = host.run(prompt)
        assert run.status == "error" and f"This VAE is an object of {pack}" in run.error


def test_a_patch_of_kjnodes_runs_by_comfyuis_code_and_is_reported(host):
    prompt = {"load": node("VAELoaderMultiGPU", vae_name="tiny_wan.safetensors", device="cpu"),
              "patch": node("PatchTritonVAE", vae=["load", 0], fuse_norm_silu=True, channels_last=True,
                            int8_conv=False, autotune=False),
              "z": node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1),
              "fast": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["load", 0]),
              "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["patch", 0]),
              "optimize": node("ZeroWasteVAEOptimize", vae=["patch", 0]),
              **{f"report {n}": node("PreviewAny", source=[n, 1]) for n in ("fast", "decode", "optimize")}}  # fmt: skip
    run = host.run(prompt)
    assert run.status == "success", run.error
    said = {n: run.outputs[f"report {n}"]["text"][0] for n in ("fast", "decode", "optimize")}
    assert "ComfyUI's own code, because another node has changed this VAE" in said["decode"]
    assert "passed on unchanged" in said["optimize"] and "ComfyUI's own code" not in said["fast"]
