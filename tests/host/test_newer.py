"""The pack in a host newer than 0.33.0, which is 0.33.0 with what later files ask of a VAE (newer_host.py)."""

from __future__ import annotations

import itertools
import json

import newer_host
import pytest
import running
import torch
from running import inside
from safetensors.torch import load_file

pytestmark = pytest.mark.host

# The host's own encodes of a VAE, and ours of the same one, by each node and choice; the first is a VAE on which the
# host has written what its checkpoint's model wants.
WAN = """
import comfy.model_prefetch
import comfy.sd
import nodes
import torch
from comfy.ldm.wan.vae import WanVAE
from zerowaste_vae.nodes.conversion import engine_vae
shape = dict(dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
draw, weights = torch.Generator().manual_seed(0), {}
for key, p in WanVAE(dim=16, z_dim=16, image_channels=3, conv_out_channels=3, **shape).state_dict().items():
    noise = torch.randn(p.shape, generator=draw)
    weights[key] = 1 + 0.1 * noise if key.endswith("gamma") else noise * (p[0].numel() ** -0.5 if p.ndim > 1 else 0.1)
pixels = torch.rand(5, 32, 48, 3, generator=draw)
tiles = {"tile_size": 512, "overlap": 64}
for pictures in (False, True):
    host = comfy.sd.VAE(sd=dict(weights), dtype=torch.float32)
    host.not_video = pictures
    ours = engine_vae(host)
    for node, more in ((nodes.VAEEncode, {}), (nodes.VAEEncodeTiled, tiles)):
        for choice in ("Auto", "Video Frames", "Individual Images"):
            a, b = (node().encode(vae, pixels, encode_as=choice, **more)[0]["samples"] for vae in (host, ours))
            apart = choice == "Individual Images" or pictures and choice == "Auto"
            assert list(b.shape) == ([5, 16, 1, 4, 6] if apart else [1, 16, 2, 4, 6]) and a.shape == b.shape
            assert (a - b).abs().max() < 4e-5 * a.std(), (choice, float((a - b).abs().max()))
seen, decode = [], type(ours.engine).decode
type(ours.engine).decode = lambda *a, **k: seen.append(comfy.model_prefetch.PAUSED) or decode(*a, **k)
z = torch.randn(1, 16, 2, 4, 6, generator=draw)
a, b = (nodes.VAEDecode().decode(vae, {"samples": z})[0] for vae in (host, ours))
assert (a - b).abs().max() < 4e-5 * a.std()
assert seen == [1] and comfy.model_prefetch.PAUSED == 0
ours.patcher.fast_disk = True
assert ours.patcher.clone().fast_disk
print("as the host")
"""

QWEN = """
import comfy.sd
import torch
from comfy.ldm.wan.vae2_2 import WanVAE
from zerowaste_vae.nodes.conversion import engine_vae
shape = dict(dim_mult=[1, 2, 4, 8, 8], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True, True])
network = WanVAE(dim=16, dec_dim=32, z_dim=64, image_channels=4, patch_size=1, temporal_kernel=1, **shape)
draw, weights = torch.Generator().manual_seed(0), {}
for key, p in network.state_dict().items():
    noise = torch.randn(p.shape, generator=draw)
    weights[key] = 1 + 0.1 * noise if "gamma" in key else noise * (p[0].numel() ** -0.5 if p.ndim > 1 else 0.1)
host = comfy.sd.VAE(sd=dict(weights), dtype=torch.float32)
ours = engine_vae(host)
assert ours.engine.arch == "qwenimage2.1"
def near(a, b):
    assert a.shape == b.shape and (a - b).abs().max() < 4e-5 * a.std(), ((a - b).abs().max(), a.std())
with torch.no_grad():
    z = torch.randn(2, 64, 4, 6, generator=draw)
    near(host.decode(z.clone()), ours.decode(z.clone()))
    for size in ((2, 64, 96, 3), (2, 64, 96, 4), (2, 70, 101, 4)):
        pixels = torch.rand(size, generator=draw)
        near(host.encode(pixels.clone()), ours.encode(pixels.clone()))
names = ("latent_channels", "output_channels", "latent_dim", "pad_channel_value", "crop_input", "upscale_ratio",
         "downscale_ratio", "not_video")
assert [getattr(ours, name) for name in names] == [getattr(host, name) for name in names]
print("as the host")
"""

# A host that no longer builds the VAE from which ours begins, then one that builds none of them.
OTHER = """
import comfy.pixel_space_convert
import comfy.taesd.taesd
import torch
from zerowaste_vae.engine import log
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.loader import Loader
from zerowaste_vae.nodes.settings import Settings
def raises(*_, **__):
    raise ValueError("pixel_space is the wrong choice for this file")
z = torch.randn(1, 16, 2, 4, 4)
expected = conversion.from_file(vae_file, "auto", None, Settings()).decode(z)
comfy.pixel_space_convert.PixelspaceConversionVAE = raises
vae = conversion.from_file(vae_file, "auto", None, Settings())
assert torch.equal(vae.decode(z), expected) and vae.latent_dim == 3 and vae.encode(torch.rand(5, 32, 32, 3)).ndim == 5
said = []
log.once = lambda text, say=None: said.append(text)
comfy.taesd.taesd.TAESD = raises
for _ in range(2):
    try:
        Loader.execute("demo (small)")
    except ValueError as error:  # the demo VAE's sizes are of no network of the host's
        assert "this ComfyUI has no network of its own for this VAE" in str(error), error
    else:
        raise AssertionError("the host has a VAE of these sizes")
assert len(said) == 1 and "this pack does not know this version of ComfyUI" in said[0], said
print("another base")
"""


@pytest.fixture(scope="module")
def newer(tmp_path_factory, newer_places):
    with running.serving(tmp_path_factory.mktemp("served"), newer_places) as server:
        yield server


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


@pytest.mark.parametrize("script, ends", [(WAN, "as the host"), (QWEN, "as the host"), (OTHER, "another base")])
def test_inside(newer_places, pack_folder, script, ends):
    assert ends in inside(newer_places, pack_folder, script)


def test_encode_nodes_of_the_host_and_ours(newer):
    """What images are is chosen on VAE Encode and on ours alike, behind our loader: the same latent."""
    assert newer.get("/system_stats")["system"]["comfyui_version"] == newer_host.VERSION
    assert "encode_as" in json.dumps(newer.get("/object_info/VAEEncodeTiled"))
    prompt = {"clip": node("ZeroWasteVAEDemoClip", frames=5)}
    prompt["vae"] = node("ZeroWasteVAELoader", vae_name="demo (small)")
    prompt["small"] = node("ImageScale", image=["clip", 0], upscale_method="area", width=48, height=32, crop="disabled")
    shapes = {"Video Frames": (1, 16, 2, 4, 6), "Individual Images": (5, 16, 1, 4, 6)}
    for choice, kind in itertools.product(shapes, ("VAEEncode", "ZeroWasteVAEEncode")):
        name = f"{kind} {choice}"
        prompt[name] = node(kind, pixels=["small", 0], vae=["vae", 0], encode_as=choice)
        prompt[f"save {name}"] = node("SaveLatent", samples=[name, 0], filename_prefix=name.replace(" ", "-"))
    run = newer.run(prompt)
    assert run.status == "success", run.error
    for choice, shape in shapes.items():
        stock, ours = (latent(newer, f"{kind} {choice}") for kind in ("VAEEncode", "ZeroWasteVAEEncode"))
        assert stock.shape == shape and torch.equal(stock, ours) and stock.std() > 0.01


def test_loading_is_shown_by_the_host(newer):
    """As what our node does before its bar moves, and no longer than that."""
    prompt = {"latent": node("EmptyHunyuanLatentVideo", width=64, height=48, length=9, batch_size=1)}
    prompt["vae"] = node("ZeroWasteVAELoader", vae_name="demo (small)")
    prompt["decode"] = node("ZeroWasteVAEDecode", samples=["latent", 0], vae=["vae", 0])
    prompt["show"] = node("PreviewImage", images=["decode", 0])
    run = newer.run(prompt)
    assert run.status == "success", run.error
    states = [data["nodes"]["decode"] for kind, data in run.events
              if kind == "progress_state" and "decode" in data["nodes"]]  # fmt: skip
    seen = [(state.get("activity"), state["value"] > 0) for state in states]
    assert [key for key, _ in itertools.groupby(seen)] == [
        (None, False), ("loading", False), (None, False), (None, True)]  # fmt: skip


def latent(server, name: str) -> torch.Tensor:
    (path,) = (server.base / "output").glob(f"{name.replace(' ', '-')}_*.latent")
    return load_file(path)["latent_tensor"]


def test_a_checkout_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "nodes.py").write_text("class VAEEncode:\n    pass\n")
    with pytest.raises(ValueError, match=r"nodes.py: .* stands there 0 times, not 1"):
        newer_host.pictures_or_a_clip(tmp_path)
