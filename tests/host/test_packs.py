"""Other packs beside this one: COMFY_PACKS names a folder of their checkouts (with what they need in the host's
environment, or on PYTHONPATH). Each that is there must load, and ours must go on working."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import running

pytestmark = pytest.mark.host

#: Folder -> a node that shows it has loaded.
KNOWN = {
    "ComfyUI-KJNodes": "VAELoaderKJ",
    "ComfyUI-VideoHelperSuite": "VHS_VideoCombine",
    "ComfyUI-GGUF": "UnetLoaderGGUF",
    "ComfyUI-WanVideoWrapper": "WanVideoVAELoader",
}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory, host_places):
    folder = Path(os.environ.get("COMFY_PACKS") or "nowhere")
    others = [folder / name for name in KNOWN if (folder / name).is_dir()]
    if not others:
        pytest.skip("needs checkouts of other packs (COMFY_PACKS)")
    with running.serving(tmp_path_factory.mktemp("crowded"), host_places, others=others) as server:
        server.others = {path.name for path in others}
        running.write_tiny_wan(host_places, server.base / "models" / "vae" / "tiny_wan.safetensors")
        yield server


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_all_of_them_load(crowded):
    nodes = crowded.get("/object_info")
    assert [KNOWN[name] for name in crowded.others if KNOWN[name] not in nodes] == []
    assert len([name for name in nodes if name.startswith("ZeroWaste")]) == 9


def test_a_vae_of_another_packs_loader_runs_on_the_engine(crowded):
    """The same frames as from the host's own loader."""
    if "ComfyUI-KJNodes" not in crowded.others:
        pytest.skip("needs KJNodes")
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


def test_a_vae_type_of_its_own_is_refused_before_the_run(crowded):
    """WanVideoWrapper's WANVAE fits no VAE socket: the host says so for our node as for its own."""
    if "ComfyUI-WanVideoWrapper" not in crowded.others:
        pytest.skip("needs WanVideoWrapper")
    prompt = {
        "z": node("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1),
        "wan": node("WanVideoVAELoader", model_name="tiny_wan.safetensors", precision="fp32"),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["wan", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="packs"),
    }
    refused = crowded.run(prompt)
    assert refused.status == "invalid"
    assert "WANVAE" in refused.error
