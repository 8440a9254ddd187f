"""HunyuanVideo's VAEs beside the host's own classes: networks of small widths, and a stock VAE through its nodes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import running
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import Checkpoint, load
from zerowaste_vae.engine.families import hunyuan, hunyuan15

pytestmark = pytest.mark.host

#: Of the outputs' standard deviation.
BOUND = 4e-5
#: Seeded weights through the host's own network, decoded and encoded. What the distribution gives is its mean.
THEIRS = """
import json, sys
job, sys.argv = json.loads(sys.argv[1]), ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from safetensors.torch import save_file
if job["kind"] == "kl":
    vae = AutoencoderKL(ddconfig=job["config"], embed_dim=job["config"]["z_channels"])
    vae.regularization.sample = False
else:
    home = "comfy.ldm.hunyuan_video.vae_refiner."
    parts = {f"{half}_config": {"target": home + half.title(), "params": job["config"]}
             for half in ("encoder", "decoder")}
    vae = AutoencodingEngine(
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{job['regularizer']}"}, **parts
    )
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for name, p in sorted(vae.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        norm = "norm" in name and name.endswith(("weight", "gamma"))
        p.copy_(1 + 0.1 * noise if norm else noise * (p[0].numel() ** -0.5 if p.ndim > 1 else 0.1))
    out = {}
    for frames in job["frames"]:
        z = torch.randn(1, job["config"]["z_channels"], (frames + 3) // 4, 3, 4, generator=generator)
        x = torch.randn(1, 3, frames, 3 * job["spatial"], 4 * job["spatial"], generator=generator)
        out |= {f"z{frames}": z, f"x{frames}": x, f"decoded{frames}": vae.decode(z), f"encoded{frames}": vae.encode(x)}
save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, job["weights"])
save_file({k: v.contiguous() for k, v in out.items()}, job["results"])
"""
_KL = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
       "ch_mult": [1, 1, 2, 2], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "conv3d": True,
       "time_compress": 4}  # fmt: skip
_SHORTCUTS = {"z_channels": 16, "block_out_channels": [16, 16, 32, 32, 64], "in_channels": 3, "out_channels": 3,
              "num_res_blocks": 2, "ffactor_spatial": 16, "ffactor_temporal": 4, "downsample_match_channel": True,
              "upsample_match_channel": True}  # fmt: skip
JOBS = {
    "hunyuanvideo": {"kind": "kl", "config": _KL, "frames": [1, 9, 13], "spatial": 8},
    "hunyuanvideo1.5": {
        "kind": "engine", "config": _SHORTCUTS, "frames": [1, 9, 13], "spatial": 16, "regularizer": "EmptyRegularizer",
    },
    "hunyuanimage-refiner": {
        "kind": "engine", "config": _SHORTCUTS | {"refiner_vae": False, "block_out_channels": [32, 32, 32, 64, 64]},
        "frames": [1], "spatial": 16, "regularizer": "DiagonalGaussianRegularizer",
    },
}  # fmt: skip


@pytest.fixture(params=JOBS)
def theirs(request, host_places, tmp_path):
    """(name, weights, results) of one of the host's networks."""
    job = JOBS[request.param] | {key: str(tmp_path / key) for key in ("weights", "results")}
    running.printed(host_places, THEIRS, json.dumps(job))
    return request.param, load_file(job["weights"]), load_file(job["results"])


def test_their_networks_are_ours(theirs, monkeypatch):
    """In plain torch, and on the fused operators through their references."""
    name, weights, results = theirs
    vae = load(Checkpoint(weights), device="cpu")
    assert vae.arch == name

    def close(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=0, atol=BOUND * float(expected.std()))

    for frames in JOBS[name]["frames"]:
        z, x, decoded, encoded = (results[f"{key}{frames}"] for key in ("z", "x", "decoded", "encoded"))
        close(vae.decode_raw(z, chunk=1), decoded)
        close(vae.model.sample(vae.encode_raw(x, chunk=1)), encoded)
    if vae.architecture.still:
        assert "only plain torch" in vae.model.decoder.program.why_not_fused()
        both = torch.cat((z, z.flip(3)), 2)  # two pictures know nothing of each other
        close(vae.decode_raw(both)[:, :, :1], decoded)
        return
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    pictures = x.permute(0, 2, 3, 4, 1).mul(0.5).add(0.5)
    close(vae.encode(pictures, any_range=True), encoded)
    close(vae.decode(z).mul(2).sub(1), decoded.clamp(-1, 1).permute(0, 2, 3, 4, 1))
    assert "reference operators" in vae.last_report.mode


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_the_stock_vae_is_known(comfy):
    """The published widths: the host knows no others. Its own decode against ours from the file and of its object."""
    path = comfy.base / "models" / "vae" / "hunyuan_video_vae.safetensors"
    architecture = hunyuan.ARCHITECTURE
    with torch.device("meta"):
        model = architecture.build(architecture.published.config)
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, p in model.state_dict().items():
        noise = torch.randn(p.shape, generator=generator)
        gain = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
        weights[name] = (1 + 0.1 * noise if "norm" in name and name.endswith("weight") else noise * gain).bfloat16()
    save_file(weights, path)
    z = torch.randn(1, 16, 3, 4, 5, generator=generator)
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, comfy.base / "input" / "hunyuan.latent")
    prompt = {
        "z": node("LoadLatent", latent="hunyuan.latent"),
        "theirs": node("VAELoader", vae_name=path.name),
        "ours": node("ZeroWasteVAELoader", vae_name=path.name),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=["z", 0], vae=["theirs", 0]),
        "plain": node("VAEDecode", samples=["z", 0], vae=["ours", 0]),
        "fast": node("VAEDecode", samples=["z", 0], vae=["optimised", 0]),
        "report": node("PreviewAny", source=["optimised", 1]),
    }
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="hy") for n in ("stock", "plain", "fast")}
    run = comfy.run(prompt, timeout=400)
    path.unlink()
    assert run.status == "success", run.error
    stock, plain, fast = (comfy.images(run, f"save {n}").astype(int) for n in ("stock", "plain", "fast"))
    assert stock.shape == (9, 32, 40, 3) and stock.std() > 10
    assert max(np.abs(plain - stock).max(), np.abs(fast - stock).max()) <= 1
    assert "hunyuanvideo" in run.outputs["report"]["text"][0]
    assert hunyuan15.ARCHITECTURE.keys.name not in run.outputs["report"]["text"][0]
