"""MiniMax H3's VAE of the host's own class, small and seeded: the engine computes what it does."""

from __future__ import annotations

import json

import pytest
import running
import torch
from safetensors.torch import load_file
from zerowaste_vae import load, read_checkpoint
from zerowaste_vae.engine.families.minimax_h3 import ARCHITECTURE

pytestmark = pytest.mark.host
#: Of an output's standard deviation.
BOUND = 4e-5
#: [T, h, w] and [F, H, W].
LATENTS = [(1, 9, 7), (2, 5, 4), (3, 4, 6), (4, 6, 4), (5, 4, 4), (6, 4, 5), (8, 3, 4), (13, 4, 3), (2, 17, 30)]
CLIPS = [(1, 64, 48), (3, 48, 64), (17, 32, 32), (18, 32, 48), (1, 272, 272), (5, 32, 460)]
#: Writes minimax.safetensors and minimax.io.safetensors into a folder.
SCRIPT = f"""
import functools, sys
sys.argv = [sys.argv[0], "--cpu", *sys.argv[1:]]
folder = sys.argv.pop()
import comfy.options
comfy.options.enable_args_parsing()
import torch
from safetensors.torch import save_file
from comfy.ldm.minimax import vae

torch.set_grad_enabled(False)
vae.ViT3DDecoder = functools.partial(vae.ViT3DDecoder, num_layers=3, heads=3)
network = vae.MiniMaxH3VideoVAE(ch=32, ch_mult=(1, 1, 2, 2, 2, 3)).eval()
network.decoder.mask_token.zero_()
g = torch.Generator().manual_seed(7)
for name, p in sorted(network.named_parameters()):
    noise = torch.randn(p.shape, generator=g)
    if "tokens" in name:
        p.copy_(noise)
    elif p.ndim >= 2:
        p.copy_(noise * (1.4 / p[0].numel()) ** 0.5)
    elif "scale" in name:
        p.copy_(0.5 + 0.1 * noise)
    else:
        p.copy_(1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.05 * noise)
io = {{}}
for size in {LATENTS}:
    name, z = "x".join(map(str, size)), torch.randn(1, 24, *size, generator=g)
    io |= {{"latent " + name: z, "decoded " + name: network.decode(z)}}
for size in {CLIPS}:
    name, x = "x".join(map(str, size)), torch.rand(1, 3, *size, generator=g) * 2 - 1
    io |= {{"pixels " + name: x, "encoded " + name: network.encode(x)}}
for name, tensors in (("minimax", network.state_dict()), ("minimax.io", io)):
    save_file({{k: v.contiguous().clone() for k, v in tensors.items()}}, f"{{folder}}/{{name}}.safetensors")
"""
#: Prints the shapes of the published network's parameters.
PUBLISHED = """
import json, sys
sys.argv = [sys.argv[0], "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
from comfy.ldm.minimax import vae

with torch.device("meta"):
    network = vae.MiniMaxH3VideoVAE()
print(json.dumps({name: list(p.shape) for name, p in network.state_dict().items()}))
"""
#: Writes int8.safetensors into a folder, its products in the host's int8 with rotated columns, and what the host makes
#: of them again.
INT8 = """
import sys
sys.argv = [sys.argv[0], "--cpu", *sys.argv[1:]]
folder = sys.argv.pop()
import functools, json
import comfy.options
comfy.options.enable_args_parsing()
import torch
from safetensors.torch import save_file
from comfy.ldm.minimax import vae
from comfy.quant_ops import TensorWiseINT8Layout

torch.set_grad_enabled(False)
vae.ViT3DDecoder = functools.partial(vae.ViT3DDecoder, num_layers=2, heads=4)
network = vae.MiniMaxH3VideoVAE(ch=32, ch_mult=(1, 1, 1, 1, 1, 1)).half()
g = torch.Generator().manual_seed(3)
stored, again = {}, {}
for name, p in sorted(network.state_dict().items()):
    p = (torch.randn(p.shape, generator=g) * (p[0].numel() ** -0.5 if p.ndim > 1 else 0.1)).half()
    if "transformer_blocks" not in name or p.ndim < 2:
        stored[name] = again[name] = p
        continue
    rows, how = TensorWiseINT8Layout.quantize(p.float(), per_channel=True, convrot=True, convrot_groupsize=256)
    told = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    again[name], layer = TensorWiseINT8Layout.dequantize(rows, how).half(), name.removesuffix(".weight")
    stored |= {name: rows, f"{layer}.weight_scale": how.scale,
               f"{layer}.comfy_quant": torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)}
for name, tensors in (("int8", stored), ("again", again)):
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, f"{folder}/{name}.safetensors")
"""


def test_int8_files_are_read_as_the_host_does(host_places, tmp_path):
    running.printed(host_places, INT8, str(tmp_path))
    read, again = (read_checkpoint(tmp_path / f"{name}.safetensors").tensors for name in ("int8", "again"))
    assert read.keys() == again.keys()
    for name, values in again.items():
        assert read[name].dtype == values.dtype == torch.float16
        assert torch.allclose(read[name].float(), values.float(), rtol=2**-10, atol=2**-20), name
    assert load(tmp_path / "int8.safetensors", device="cpu").decode(torch.zeros(1, 24, 1, 1, 1)).shape[1] == 1


def test_the_published_network_is_the_hosts(host_places):
    with torch.device("meta"):
        state = ARCHITECTURE.build(ARCHITECTURE.published.config).state_dict()
    shapes = json.loads(running.printed(host_places, PUBLISHED).splitlines()[-1])
    assert {name: list(p.shape) for name, p in state.items()} == shapes


@pytest.fixture(scope="module")
def written(tmp_path_factory, host_places):
    """(VAE of the host's weights, what its class makes)"""
    folder = tmp_path_factory.mktemp("minimax")
    running.printed(host_places, SCRIPT, str(folder))
    return load(folder / "minimax.safetensors", device="cpu"), load_file(folder / "minimax.io.safetensors")


def deviation(actual, expected):
    return float((actual - expected).abs().max() / expected.std())


@pytest.mark.parametrize("size", LATENTS, ids=str)
def test_decodes_are_the_hosts(written, size):
    vae, tensors = written
    name = "x".join(map(str, size))
    made = vae.decode(tensors[f"latent {name}"], native_blend="separate").movedim(-1, 1)
    assert deviation(made, tensors[f"decoded {name}"]) < BOUND


@pytest.mark.parametrize("size", CLIPS, ids=str)
def test_encodes_are_the_hosts(written, size):
    """Also where sides are no whole latents: its last tile is then smaller."""
    vae, tensors = written
    name = "x".join(map(str, size))
    moments = vae.encode_raw(tensors[f"pixels {name}"])
    assert deviation(vae.model.sample(moments), tensors[f"encoded {name}"]) < BOUND


#: A stock Load VAE of an int8 file, in the place of the published sizes those of the recorded one.
STOCK = """
import sys
sys.argv = [sys.argv[0], "--cpu", *sys.argv[1:]]
folder = sys.argv.pop()
import functools
import comfy.options
comfy.options.enable_args_parsing()
import comfy.sd
import comfy.utils
import torch
from comfy.ldm.minimax import vae as minimax
from safetensors.torch import load_file
from zerowaste_vae.engine.families.minimax_h3 import ARCHITECTURE
from zerowaste_vae.nodes import conversion, services
from zerowaste_vae.nodes.loader import Optimize

blend = services.native_blend(ARCHITECTURE)
minimax.ViT3DDecoder = functools.partial(minimax.ViT3DDecoder, num_layers=1, heads=2)
minimax.MiniMaxH3VideoVAE = functools.partial(minimax.MiniMaxH3VideoVAE, ch=32, ch_mult=(1,) * 6)
io = load_file(f"{folder}/narrow.io.safetensors")
vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(f"{folder}/narrow.weights.safetensors"))
assert any(name.endswith(".comfy_quant") for name in vae.get_sd())

def difference(made, expected):
    return float((made.movedim(-1, 1) - expected).abs().max())

floats, codes = conversion.engine_vae(vae), Optimize.execute(vae, precision="int8")[0]
assert (floats.engine.precision, codes.engine.precision) == ("fp32", "int8")
z = io["T1tiles.latent"]
assert difference(floats.decode(z), io["T1tiles.decode"]) < 4e-5
assert difference(codes.decode(z), io["T1tiles.int8"]) < 8e-3 < difference(codes.decode(z), 0)
print("blend", blend, f"({blend} blend)" in floats.engine.last_report.plan)

class Newer(torch.nn.Module):
    def tiled_decode(self, z):  # the first corner of the last tile is the first tile's
        return torch.full_like(z, float(self._decode_pixels(torch.zeros(4, 4))[2, 2]))

services.native_blend.cache_clear()
minimax.MiniMaxH3VideoVAE = Newer
print("then", services.native_blend(ARCHITECTURE))
"""


def test_a_stock_int8_vae_runs_on_the_engine(host_places, pack_folder, shared):
    """Its codes where int8 is asked for, their float values on a CPU; tiles blend as this host's do."""
    folder = str(shared / "golden" / "minimax_h3_int8")
    said = running.printed(host_places, STOCK, folder, folder=pack_folder)
    assert "blend separate True" in said and "then assembled" in said
