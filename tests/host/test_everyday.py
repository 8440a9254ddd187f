"""What people do with a ComfyUI besides running a whole workflow once: a part of it, folders elsewhere, another cache,
and packs that call the host's nodes with our VAE (stand-ins: their own sources are not here)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import running
import test_kl as kl

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A host that keeps the last ten results, with a second folder of VAEs and the stand-ins."""
    base = tmp_path_factory.mktemp("everyday")
    (base / "elsewhere" / "sub").mkdir(parents=True)
    config = base / "paths.yaml"
    config.write_text(f"mine:\n  base_path: {json.dumps(str(base))}\n  vae: elsewhere\n")
    options = ("--cpu", "--cache-lru", "10", "--extra-model-paths-config", str(config))
    stand_ins = Path(__file__).with_name("stand_ins")
    with running.serving(base / "comfy", running.newest(), others=[stand_ins], device=options) as server:
        vaes = server.base / "models" / "vae"
        for name in ("tiny.safetensors", "tiny.gguf"):
            shutil.move(vaes / name, base / "elsewhere" / "sub" / name)
        kl.write("sd", vaes / "tiny_sd.safetensors")
        yield server


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def clip(file: str) -> dict:
    """A clip of five frames of 48x32, encoded and decoded by our nodes with a VAE of this file."""
    return {
        "clip": node("ZeroWasteVAEDemoClip", frames=5),
        "small": node("ImageScale", image=["clip", 0], upscale_method="area", width=48, height=32, crop="disabled"),
        "vae": node("ZeroWasteVAELoader", vae_name=file),
        "encode": node("ZeroWasteVAEEncode", pixels=["small", 0], vae=["vae", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="everyday"),
    }


def test_the_log_at_start(host):
    """One line of the pack's at most, before anything runs."""
    before, started, _ = host.log().partition("Starting server")
    assert started and sum("Zero-Waste" in line for line in before.splitlines()) <= 1


@pytest.mark.parametrize("file", ["sub/tiny.safetensors", "sub/tiny.gguf"])
def test_files_of_folders_elsewhere(host, file):
    """Listed under their folder, planned, loaded and run; the path is nobody's business."""
    offered = host.get("/object_info/ZeroWasteVAELoader")["ZeroWasteVAELoader"]["input"]["required"]["vae_name"]
    assert file in json.dumps(offered)
    run = host.run(clip(file))
    assert run.status == "success", run.error
    assert host.images(run, "save").std() > 5
    plan = host.get(f"/zerowaste_vae/plan?model={file}&width=64&height=64&frames=5")
    assert plan["fits"] and not plan["assumed"]
    assert "elsewhere" not in json.dumps(run.outputs)


def test_a_part_of_a_workflow(host):
    """Run up to the encode's picture alone, ours does nothing else; then the rest takes the latent from the cache, and
    what ran before says so again."""
    prompt = clip("demo (small)")
    prompt["before"] = node("PreviewImage", images=["small", 0])
    prompt["note"] = node("PreviewAny", source=["encode", 1])
    part = host.run(prompt, only=["note"])
    assert part.status == "success", part.error
    assert {"vae", "encode", "note"} <= part.executed() and not part.executed() & {"decode", "save", "before"}
    whole = host.run(prompt)
    assert whole.status == "success", whole.error
    assert {"vae", "encode"} <= whole.cached() and {"decode", "save", "before"} <= whole.executed()
    again = host.run(prompt)
    assert {"vae", "encode", "decode"} <= again.cached()
    assert again.outputs["decode"]["zerowaste"][0]["text"] == whole.outputs["decode"]["zerowaste"][0]["text"]


@pytest.mark.parametrize("kind, tiled", [("Detailer", False), ("Detailer", True), ("Inpainting", False),
                                         ("Upscaler", False), ("Upscaler", True)])  # fmt: skip
def test_packs_that_call_the_hosts_nodes(host, kind, tiled):
    """With our VAE in place of the host's they make the same pictures, but for rounding. Alike in tiles, which ours
    puts together without seams: the pictures here are smaller than one."""
    prompt = {"clip": node("ZeroWasteVAEDemoClip", frames=2)}
    size = {"width": 128, "height": 64, "upscale_method": "area", "crop": "disabled"}
    prompt["small"] = node("ImageScale", image=["clip", 0], **size)
    prompt["stock"] = node("VAELoader", vae_name="tiny_sd.safetensors")
    prompt["ours"] = node("ZeroWasteVAELoader", vae_name="tiny_sd.safetensors")
    for vae in ("stock", "ours"):
        prompt[f"run {vae}"] = node(f"StandIn{kind}", image=["small", 0], vae=[vae, 0], tiled=tiled)
        prompt[f"save {vae}"] = node("SaveImage", images=[f"run {vae}", 0], filename_prefix=f"{kind}-{tiled}-{vae}")
    run = host.run(prompt)
    assert run.status == "success", run.error
    theirs, ours = (host.images(run, f"save {vae}").astype(int) for vae in ("stock", "ours"))
    assert theirs.shape == ours.shape == (2, 64, 128, 3) and theirs.std() > 5
    assert np.abs(theirs - ours).max() <= 2
