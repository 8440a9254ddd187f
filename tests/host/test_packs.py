"""Other packs beside this one: COMFY_PACKS names a folder of their checkouts (with what they need in the host's
environment, or on PYTHONPATH). Each that is there must load, and ours must go on working."""

from __future__ import annotations

import av
import numpy as np
import pytest
import running
import test_kl as kl

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def crowded(tmp_path_factory, host_places):
    with running.crowded(tmp_path_factory.mktemp("crowded"), host_places) as server:
        kl.write("sd", server.base / "models" / "vae" / "tiny_sd.safetensors")
        yield server


def needing(server, pack: str) -> None:
    if pack not in server.others:
        pytest.skip(f"needs {pack} in COMFY_PACKS")


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_all_of_them_load(crowded):
    nodes = crowded.get("/object_info")
    for name in crowded.others:
        assert crowded.text(sign) if (sign := running.PACKS[name]).startswith("/") else sign in nodes, name
    assert len([name for name in nodes if name.startswith("ZeroWaste")]) == 11


def test_a_vae_of_another_packs_loader_runs_on_the_engine(crowded):
    """The same frames as from the host's own loader."""
    needing(crowded, "ComfyUI-KJNodes")
    kj = node("VAELoaderKJ", vae_name="tiny_wan.safetensors", device="main_device", weight_dtype="fp32")
    prompt = {"z": node("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1), "kj": kj}
    prompt["stock"] = node("VAELoader", vae_name="tiny_wan.safetensors")
    for name in ("kj", "stock"):
        prompt[f"decode {name}"] = node("ZeroWasteVAEDecode", samples=["z", 0], vae=[name, 0])
        prompt[f"save {name}"] = node("SaveImage", images=[f"decode {name}", 0], filename_prefix=f"packs-{name}")
    run = crowded.run(prompt)
    assert run.status == "success", run.error
    assert run.outputs["decode kj"]["zerowaste"][0]["architecture"] == "wan2.1"
    assert np.array_equal(crowded.images(run, "save kj"), crowded.images(run, "save stock"))


def test_foreign_vae_type_is_refused(crowded):
    """WanVideoWrapper's WANVAE fits no VAE socket: the host says so for our node as for its own."""
    needing(crowded, "ComfyUI-WanVideoWrapper")
    prompt = {
        "z": node("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1),
        "wan": node("WanVideoVAELoader", model_name="tiny_wan.safetensors", precision="fp32"),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["wan", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="packs"),
    }
    refused = crowded.run(prompt)
    assert refused.status == "invalid"
    assert "WANVAE" in refused.error


def test_a_node_that_calls_the_network_itself(crowded):
    """KJNodes' Decode and Save Video decodes behind the VAE's back, whole and in tiles: as the host's VAE does it."""
    needing(crowded, "ComfyUI-KJNodes")
    tiles = {"tiling.tile_size": 64, "tiling.overlap": 0, "tiling.temporal_size": 4096, "tiling.temporal_overlap": 16}
    prompt = {"z": node("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1)}
    prompt["stock"] = node("VAELoader", vae_name="tiny_wan.safetensors")
    prompt["ours"] = node("ZeroWasteVAEOptimize", vae=["stock", 0])
    for vae in ("stock", "ours"):
        for tiling in ("disabled", "enabled"):
            prompt[f"{vae} {tiling}"] = node(
                "DecodeAndSaveVideo", video_latent=["z", 0], video_vae=[vae, 0], fps=8.0, format="auto", codec="auto",
                filename_prefix=f"kj-{vae}-{tiling}", **{"tiling": tiling, **tiles},
            )  # fmt: skip
    run = crowded.run(prompt)
    assert run.status == "success", run.error
    for tiling in ("disabled", "enabled"):
        theirs, ours = (video(crowded, run, f"{vae} {tiling}") for vae in ("stock", "ours"))
        assert theirs.shape == (5, 48, 64, 3) and theirs.std() > 10
        assert np.abs(theirs - ours).mean() < 1


def test_a_node_that_scales_between_two_of_a_vaes_calls(crowded):
    """Impact's: decoded, scaled and encoded again, with our VAE as with the host's."""
    needing(crowded, "ComfyUI-Impact-Pack")
    prompt = {"clip": node("ZeroWasteVAEDemoClip", frames=1)}
    prompt["stock"] = node("VAELoader", vae_name="tiny_sd.safetensors")
    prompt["ours"] = node("ZeroWasteVAELoader", vae_name="tiny_sd.safetensors")
    prompt["z"] = node("VAEEncode", pixels=["clip", 0], vae=["stock", 0])
    how = {"scale_method": "bilinear", "scale_factor": 1.5, "use_tiled_vae": False}
    for vae in ("stock", "ours"):
        prompt[f"scale {vae}"] = node("LatentPixelScale", samples=["z", 0], vae=[vae, 0], **how)
        prompt[f"decode {vae}"] = node("VAEDecode", samples=[f"scale {vae}", 0], vae=["stock", 0])
        prompt[f"save {vae}"] = node("SaveImage", images=[f"decode {vae}", 0], filename_prefix=f"impact-{vae}")
    run = crowded.run(prompt)
    assert run.status == "success", run.error
    theirs, ours = (crowded.images(run, f"save {vae}").astype(int) for vae in ("stock", "ours"))
    assert theirs.shape == ours.shape and theirs.std() > 5
    assert np.abs(theirs - ours).max() <= 2


def video(server, run, name: str) -> np.ndarray:
    """Return what a node saved as a video: [F, H, W, 3] in 0..255."""
    (saved,) = (run.outputs[name].get("images") or run.outputs[name]["gifs"])[-1:]
    with av.open(str(server.base / "output" / saved["subfolder"] / saved["filename"])) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(np.float32)


def test_videos_of_another_pack_on_both_ends(crowded):
    """VideoHelperSuite's Load Video before our Encode, its Video Combine behind our Decode."""
    needing(crowded, "ComfyUI-VideoHelperSuite")
    prompt = {
        "load": load_video(),
        "vae": node("ZeroWasteVAELoader", vae_name="tiny_wan.safetensors"),
        "encode": node("ZeroWasteVAEEncode", pixels=["load", 0], vae=["vae", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "save": node(
            "VHS_VideoCombine", images=["decode", 0], frame_rate=8, loop_count=0, filename_prefix="vhs",
            format="video/h264-mp4", pingpong=False, save_output=True,
        ),
    }  # fmt: skip
    run = crowded.run(prompt)
    assert run.status == "success", run.error
    assert video(crowded, run, "save").shape == (5, 48, 64, 3)


def load_video(**more) -> dict:
    whole = {"force_rate": 0, "custom_width": 0, "custom_height": 0, "frame_load_cap": 5, "skip_first_frames": 0}
    return node("VHS_LoadVideo", video="clip.mp4", **whole, select_every_nth=1, format="None", **more)


def test_our_vae_in_another_packs_nodes(crowded):
    """VideoHelperSuite encodes as it loads and decodes in batches, which it does with image VAEs: the same pictures."""
    needing(crowded, "ComfyUI-VideoHelperSuite")
    prompt = {"ours": node("ZeroWasteVAELoader", vae_name="tiny_sd.safetensors"), "load": load_video(vae=["ours", 0])}
    prompt["frames"] = load_video()
    prompt["encode"] = node("ZeroWasteVAEEncode", pixels=["frames", 0], vae=["ours", 0])
    prompt["batches"] = node("VHS_VAEEncodeBatched", pixels=["frames", 0], vae=["ours", 0], per_batch=2)
    for z in ("load", "encode", "batches"):
        prompt[f"decode {z}"] = node("ZeroWasteVAEDecode", samples=[z, 0], vae=["ours", 0])
    prompt["decode by two"] = node("VHS_VAEDecodeBatched", samples=["encode", 0], vae=["ours", 0], per_batch=2)
    decodes = [name for name in prompt if name.startswith("decode")]
    for name in decodes:
        prompt[f"save {name}"] = node("SaveImage", images=[name, 0], filename_prefix=name.replace(" ", "-"))
    run = crowded.run(prompt)
    assert run.status == "success", run.error
    first, *others = (crowded.images(run, f"save {name}") for name in decodes)
    assert len(first) == 5 and first.std() > 10
    assert all(np.array_equal(first, other) for other in others)
