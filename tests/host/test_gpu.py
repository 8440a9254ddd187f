"""A server on a GPU, under the arguments people start it with: the same frames, room made and given back, stopping."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import running
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.archs.seedvr2 import ARCHITECTURE

pytestmark = [pytest.mark.host, pytest.mark.gpu]

SERVERS = {
    "as it comes": (),
    "dynamic VRAM off": ("--disable-dynamic-vram",),
    "fast": ("--fast",),
    "torch's allocator": ("--disable-cuda-malloc",),
    "no pinned memory": ("--disable-pinned-memory",),
    "copies wait": ("--disable-async-offload",),
    "no VRAM, 2 GB reserved": ("--novram", "--reserve-vram", "2"),
    "bf16": ("--bf16-vae",),
}
GIB = 1 << 30
#: 17 frames of 640x368 take 4.5 GB without a target; 161 take a second, so that a request to stop finds them running.
LATENTS = {"z": (1, 16, 5, 46, 80), "long": (1, 16, 41, 46, 80)}


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a file of SeedVR2's published widths, which every server is shown: drawing it takes seconds."""
    folder = tmp_path_factory.mktemp("models")
    save_file(running.random_weights(ARCHITECTURE.published.config), folder / "full_width.safetensors")
    return folder


@pytest.fixture(scope="module", params=SERVERS, ids=lambda name: name.replace(" ", "-"))
def server(request, tmp_path_factory, host_places, models):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    heavy = Path(__file__).with_name("heavy_pack")
    base = tmp_path_factory.mktemp("gpu")
    with running.serving(base, host_places, others=[heavy], device=SERVERS[request.param]) as comfy:
        for file in models.iterdir():
            (comfy.base / "models" / "vae" / file.name).symlink_to(file)
        for name, shape in LATENTS.items():
            z = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
            save_file(content, comfy.base / "input" / f"{name}.latent")
        yield comfy


def decoding(latent: str = "z", **widgets) -> dict:
    """Nodes 'z', 'vae', 'decode' and 'look'."""
    return {
        "z": node("LoadLatent", latent=f"{latent}.latent"),
        "vae": node("ZeroWasteVAELoader", vae_name="full_width.safetensors"),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], **widgets),
        "look": node("TestLook", images=["decode", 0]),
    }


def told(comfy, prompt: dict, name: str) -> dict:
    """What the node `name` says in a run, which must succeed."""
    run = comfy.run(prompt, timeout=240)
    assert run.status == "success", run.error
    return json.loads(run.outputs[name]["text"][0])


def frames(comfy, prompt: dict) -> dict:
    """Shape, spread and a digest of every bit: writing pictures would take longer than decoding."""
    return told(comfy, prompt, "look")


def memory(comfy) -> dict:
    return told(comfy, {"forget": node("TestForget")}, "forget")


def test_stock_nodes_ours_and_every_target_give_the_same_frames(server):
    expected = frames(server, decoding())
    assert expected["shape"] == [17, 368, 640, 3]
    assert expected["std"] > 0.08
    assert frames(server, decoding(tiling="untiled", vram_gb=2.0)) == expected
    stock = decoding()
    stock["decode"] = node("VAEDecode", samples=["z", 0], vae=["vae", 0])
    assert frames(server, stock) == expected
    own = decoding()
    own["vae"] = node("VAELoader", vae_name="full_width.safetensors")
    assert frames(server, own) == expected


def test_another_model_makes_room_and_comes_back(server):
    """Ours, a model that leaves too little for us, ours again: no failure, the same frames, in either order."""
    expected = frames(server, decoding())
    prompt = decoding(chunk=1) | {"heavy": node("TestLoadHeavy", samples=["z", 0], gib=6, free=8)}
    prompt["decode"]["inputs"]["samples"] = ["heavy", 0]
    for chunk in (1, 2):
        prompt["decode"]["inputs"]["chunk"] = chunk
        assert frames(server, prompt) == expected
    memory(server)


def test_stopping_and_free_give_the_memory_back(server):
    expected = frames(server, decoding())  # and whatever stays for the life of a process is there
    server.free()
    before, said = memory(server), server.log().count("Traceback")
    stopped = server.run(decoding("long", chunk=1, output="float16"), at="decode", do=server.interrupt, timeout=240)
    assert stopped.status == "interrupted", stopped.error
    assert frames(server, decoding(chunk=3)) == expected
    server.free()
    after = memory(server)
    assert after["allocated"] <= before["allocated"] + 0.1 * GIB
    assert after["free"] >= before["free"] - 0.3 * GIB
    assert frames(server, decoding(chunk=2)) == expected
    assert server.log().count("Traceback") == said, server.log()[-3000:]
