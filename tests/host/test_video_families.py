"""VAEs of the host's own classes, small and seeded: the engine computes what they do, from files and from objects."""

from __future__ import annotations

import json

import numpy as np
import pytest
import running
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import load

pytestmark = pytest.mark.host
#: Of an output's standard deviation.
BOUND = 4e-5
NAMES = ("ltx 0.9.0", "ltx 0.9.1", "ltx 0.9.5", "ltx without a description", "ltx of other blocks", "mochi")
#: Writes NAME.safetensors and NAME.io.safetensors of each into a folder.
SCRIPT = """
import json, sys
sys.argv = [sys.argv[0], "--cpu", *sys.argv[1:]]
folder = sys.argv.pop()
import comfy.options
comfy.options.enable_args_parsing()
import torch
from safetensors.torch import save_file
from comfy.ldm.genmo.vae import model as mochi
from comfy.ldm.lightricks.vae import causal_video_autoencoder as ltx

torch.set_grad_enabled(False)
randn = torch.randn

def seeded(network):
    g = torch.Generator().manual_seed(3)
    values = dict(network.named_parameters()) | {n: b for n, b in network.named_buffers() if "statistics" in n}
    for name, p in sorted(values.items()):
        if "std-of" in name:
            p.copy_(0.5 + torch.rand(p.shape, generator=g))
        elif p.ndim >= 2:
            p.copy_(randn(p.shape, generator=g) * (1.2 / p[0].numel() ** 0.5))
        elif p.ndim:
            p.copy_(0.1 * randn(p.shape, generator=g) + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return network.eval()

def write(name, network, metadata, **io):
    state = {k: v.contiguous().clone() for k, v in network.state_dict().items()}
    save_file(state, f"{folder}/{name}.safetensors", metadata)
    save_file({k: v.contiguous() for k, v in io.items()}, f"{folder}/{name}.io.safetensors")

def ltx_case(name, config, described=True):
    config = json.loads(json.dumps(config)) | {"encoder_base_channels": 8, "decoder_base_channels": 8}
    network = seeded(ltx.VideoVAE(config=config))
    network.decode_noise_scale = 0.0
    # Noise that is added inside is drawn by its height and width.
    ltx.torch.randn = lambda *a, **k: torch.zeros(*a) if isinstance(a[0], torch.Size) else randn(*a, **k)
    g = torch.Generator().manual_seed(1)
    z, x = randn(1, 128, 3, 2, 3, generator=g), randn(1, 3, 17, 64, 96, generator=g)
    metadata = {"config": json.dumps({"vae": config})} if described else {}
    write(name, network, metadata, latent=z, decoded=network.decode(z), pixels=x, encoded=network.encode(x))
    ltx.torch.randn = randn

published = [ltx.VideoVAE.get_default_config(None, version) for version in range(3)]
for name, config in zip(("ltx 0.9.0", "ltx 0.9.1", "ltx 0.9.5"), published):
    ltx_case(name, config)
ltx_case("ltx without a description", published[2], described=False)
blocks = [["res_x", 1], ["compress_space", {"multiplier": 2}], ["res_x", {"num_layers": 2}],
          ["compress_time", {"multiplier": 2}], ["res_x", 1], ["compress_all", {"multiplier": 1}], ["res_x", 1],
          ["compress_all", {"multiplier": 2}], ["res_x", 1]]
ltx_case("ltx of other blocks", published[2] | {
    "timestep_conditioning": False, "spatial_padding_mode": "zeros", "decoder_blocks": blocks})

both = {"base_channels": 32, "channel_multipliers": [1, 2, 3, 4], "latent_dim": 12, "padding_mode": "replicate"}
network = torch.nn.Module()
network.encoder = mochi.Encoder(
    in_channels=15, num_res_blocks=[1, 1, 2, 1, 1], temporal_reductions=[1, 2, 3], spatial_reductions=[2, 2, 2],
    prune_bottlenecks=[False] * 5, has_attentions=[False, True, True, True, True], input_is_conv_1x1=True, **both)
network.decoder = mochi.Decoder(
    num_res_blocks=[1, 1, 4, 1, 1], temporal_expansions=[1, 2, 3], spatial_expansions=[2, 2, 2],
    has_attention=[False] * 5, output_norm=False, **both)
seeded(network)
g = torch.Generator().manual_seed(1)
z, x = randn(1, 12, 3, 3, 4, generator=g), torch.rand(1, 3, 13, 24, 32, generator=g) * 2 - 1
write("mochi", network, {}, latent=z, decoded=network.decoder(z), pixels=x, encoded=network.encoder(x).mean)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory, host_places):
    folder = tmp_path_factory.mktemp("families")
    running.printed(host_places, SCRIPT, str(folder))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_computes_what_the_host_does(written, name):
    vae, io = load(written / f"{name}.safetensors", device="cpu"), load_file(written / f"{name}.io.safetensors")
    assert vae.arch == name.partition(" ")[0]
    decoded = vae.decode_raw(io["latent"], chunk=1, frames=3)
    assert (decoded - io["decoded"]).abs().max() < BOUND * io["decoded"].std()
    encoded = vae.model.sample(vae.encode_raw(io["pixels"], chunk=1, frames=3))
    assert (encoded - io["encoded"]).abs().max() < BOUND * io["encoded"].std()


def test_what_the_host_says_of_its_networks_is_read(written):
    """Borders, shortcuts and noise that no shape tells."""
    timed, other = (load(written / f"{name}.safetensors", device="cpu").model.config for name in (NAMES[2], NAMES[4]))
    assert (timed.decoder_border, timed.timestep, timed.noise) == ("reflect", 0.05, 0.025)
    assert (other.decoder_border, other.timestep, other.noise) == ("zero", None, 0.0)
    assert [b.stride for b in other.decoder_blocks if b.stride] == [(2, 2, 2), (2, 2, 2), (2, 1, 1), (1, 2, 2)]
    assert json.dumps(timed.decoder_widths) == "[64, 32, 16, 8]"


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_stock_and_own_nodes_agree(written, comfy):
    """From the file, and of the stock VAE object, whose description no weight holds."""
    file = "tiny_ltx.safetensors"
    path = comfy.base / "models" / "vae" / file
    path.write_bytes((written / f"{NAMES[4]}.safetensors").read_bytes())
    content = {"latent_tensor": load_file(written / f"{NAMES[4]}.io.safetensors")["latent"]}
    save_file(content | {"latent_format_version_0": torch.tensor([])}, comfy.base / "input" / "ltx.latent")
    z = ["z", 0]
    prompt = {
        "z": node("LoadLatent", latent="ltx.latent"),
        "theirs": node("VAELoader", vae_name=file),
        "ours": node("ZeroWasteVAELoader", vae_name=file),
        "optimised": node("ZeroWasteVAEOptimize", vae=["theirs", 0]),
        "stock": node("VAEDecode", samples=z, vae=["theirs", 0]),
        "plain": node("VAEDecode", samples=z, vae=["ours", 0]),
        "fast": node("VAEDecode", samples=z, vae=["optimised", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=z, vae=["theirs", 0], chunk=1),
        "again": node("ZeroWasteVAEEncode", pixels=["stock", 0], vae=["ours", 0]),
        "back": node("VAEDecode", samples=["again", 0], vae=["ours", 0]),
        "how": node("PreviewAny", source=["decode", 1]),
    }
    names = ("stock", "plain", "fast", "decode", "back")
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="ltx") for n in names}
    try:
        run = comfy.run(prompt)
    finally:
        path.unlink()
    assert run.status == "success", run.error
    frames = {n: comfy.images(run, f"save {n}").astype(int) for n in names}
    assert frames["stock"].shape == frames["back"].shape == (17, 64, 96, 3)
    assert frames["stock"].std() > 20
    for name in names[1:4]:
        assert np.abs(frames[name] - frames["stock"]).max() <= 1, name
    assert "decode 17 frames of 96x64" in run.outputs["how"]["text"][0]


FOLLOWED = """
import sys
path, sys.argv = sys.argv[1], ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import copy
import pathlib
import torch
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.loader import Optimize
from zerowaste_vae.nodes.settings import Settings
vae = conversion.from_file(pathlib.Path(path), "auto", None, Settings())
z = torch.randn(1, vae.latent_channels, 3, 2, 2)
usual, chosen = vae.decode(z), copy.copy(vae)
chosen.first_stage_model.decode_timestep, chosen.first_stage_model.decode_noise_scale = 0.3, 0.0
wanted = vae.engine.decode(z, timestep=0.3, noise=0.0)
assert not torch.equal(wanted, usual)
for one in (chosen, copy.deepcopy(chosen), Optimize.execute(chosen)[0], Optimize.execute(chosen, precision="fp32")[0]):
    assert torch.equal(one.decode(z), wanted)
assert torch.equal(conversion.with_precision(chosen, "bf16").decode(z).float(),
                   conversion.with_precision(vae, "bf16").engine.decode(z, timestep=0.3, noise=0.0))
assert torch.equal(vae.decode(z), usual)
chosen.encode(usual[0])
print("followed")
"""


def test_a_timestep_that_nodes_set_is_followed(written, host_places, pack_folder):
    """They copy the VAE and set it on its network, as on the host's own."""
    path = str(written / f"{NAMES[2]}.safetensors")
    assert "followed" in running.printed(host_places, FOLLOWED, path, folder=pack_folder)
