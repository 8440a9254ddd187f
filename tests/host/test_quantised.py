"""Quantised layers of a network in which the host looks for none: its own loader takes their codes for weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import running
import torch
from safetensors.torch import load_file, save_file
from test_plan_route import known
from zerowaste_vae import read_checkpoint
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import wan

pytestmark = pytest.mark.host
NAME, PACKED, PLAIN = "quantised_wan.safetensors", "packed_wan.safetensors", "fp8_wan.safetensors"


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def told(**facts) -> torch.Tensor:
    return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)


def write(comfy) -> None:
    """Write a small Wan VAE in fp8 with scales, one in fp8 alone, and one with a layer in 4 bit."""
    folder, widths = comfy.base / "models" / "vae", (16, 32, 64, 64)
    tensors = random_checkpoint(wan.Config(widths, widths), architecture=wan.WAN21).tensors
    stored = dict(tensors)
    for name in [name for name, tensor in tensors.items() if tensor.ndim > 2 and name.endswith(".weight")]:
        layer, weight = name.removesuffix(".weight"), tensors[name].float()
        scale = weight.abs().max() / 448
        stored[name] = (weight / scale).to(torch.float8_e4m3fn)
        stored |= {f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": told(format="float8_e4m3fn")}
    save_file(stored, folder / NAME)
    fp8 = {name: tensors[name].to(torch.float8_e4m3fn) for name, tensor in stored.items() if tensor.itemsize == 1
           and name in tensors}  # fmt: skip
    save_file(tensors | fp8, folder / PLAIN)
    layer = "decoder.middle.1.proj"
    rows = tensors[f"{layer}.weight"].flatten(1)
    half = torch.zeros(len(rows), rows.shape[1] // 2, dtype=torch.int8)
    packed = {f"{layer}.weight": half, f"{layer}.weight_scale": torch.ones(len(rows)),
              f"{layer}.comfy_quant": told(format="convrot_w4a4", convrot_groupsize=64)}  # fmt: skip
    save_file(tensors | packed, folder / PACKED)


def test_the_stock_loaders_vae_runs_on_the_engine(comfy):
    """On values of the file: decoded, compared with the host's own class on them, and saved."""
    write(comfy)
    prompt = {
        "z": node("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1),
        "theirs": node("VAELoader", vae_name=NAME), "ours": node("ZeroWasteVAELoader", vae_name=NAME),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=["z", 0], vae=["theirs", 0]),
        "engine": node("VAEDecode", samples=["z", 0], vae=["ours", 0]),
        "node": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["theirs", 0]),
        "behind": node("VAEDecode", samples=["z", 0], vae=["optimised", 0]),
        "compare": node("ZeroWasteVAECompare", samples=["z", 0], vae=["theirs", 0]),
        "file": node("ZeroWasteVAESave", vae=["theirs", 0], filename_prefix="wan", type="safetensors f32"),
    }  # fmt: skip
    names = "stock", "engine", "node", "behind"
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="quantised") for n in names}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    pictures = {n: comfy.images(run, f"save {n}").astype(int) for n in names}
    assert all(np.array_equal(pictures[name], pictures["engine"]) for name in ("node", "behind"))
    assert np.abs(pictures["stock"] - pictures["engine"]).max() > 50  # codes as weights
    assert run.outputs["compare"]["zerowaste"][0]["comparison"]["psnr"] > 80
    (written,) = (comfy.base / "output").glob("wan_*.safetensors")
    expected, saved = read_checkpoint(comfy.base / "models" / "vae" / NAME).tensors, load_file(written)
    assert all(torch.equal(saved[name], values.float()) for name, values in expected.items())
    assert "was read anew" in comfy.log()
    shown = {name: known(comfy, name)["ours_only"] for name in ("tiny.safetensors", NAME, PACKED)}
    assert shown == {"tiny.safetensors": False, NAME: False, PACKED: True}


def test_forgotten_file_needs_our_loader(old_comfy):
    """By the panel's answer, before a run."""
    write(old_comfy)
    old_comfy.get("/object_info/ZeroWasteVAELoader")  # lists the files
    assert known(old_comfy, NAME)["ours_only"] is True
    prompt = {
        "z": node("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1),
        "ours": node("ZeroWasteVAELoader", vae_name=NAME),
        "node": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["ours", 0]),
        "save": node("SaveImage", images=["node", 0], filename_prefix="quantised"),
    }
    run = old_comfy.run(prompt)
    assert run.status == "success", run.error


CODES = """
import comfy.sd
import torch
from comfy.ldm.wan.vae import WanVAE
from zerowaste_vae.engine import InputError
from zerowaste_vae.nodes import conversion
shape = dict(dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
weights = WanVAE(dim=4, z_dim=16, image_channels=3, conv_out_channels=3, **shape).state_dict()
weights = {key: torch.randn_like(t) for key, t in weights.items()}
assert conversion.engine_vae(comfy.sd.VAE(sd=dict(weights))) is not None
plain = comfy.sd.VAE(sd=dict(weights))
conv = plain.first_stage_model.decoder.conv1
conv.weight = torch.nn.Parameter(conv.weight.to(torch.float8_e4m3fn), requires_grad=False)
ours = conversion.engine_vae(plain)  # hosts with dynamic VRAM keep fp8, and codes as they are
assert ours.engine.model.state_dict()["decoder.conv1.weight"].equal(conv.weight.float())
conv.weight = torch.nn.Parameter(torch.full_like(conv.weight, 3, dtype=torch.int8), requires_grad=False)
assert conversion.engine_vae(plain) is not ours
weights["decoder.conv1.weight"] = weights["decoder.conv1.weight"].mul(30).round().to(torch.int8)
try:
    conversion.engine_vae(comfy.sd.VAE(sd=weights))
except InputError as error:
    print("said:", error)
"""


def test_codes_that_another_loader_took_for_weights_are_refused(host_places, pack_folder):
    said = running.inside(host_places, pack_folder, CODES)
    assert "said: decoder.conv1.weight of this VAE holds codes" in said and "Zero-Waste VAE Loader" in said
