"""Other nodes change the weights and calls of a VAE: ours follows them, of the host's ours follows what it can, and
the host's own code runs if it cannot."""

import pytest
from running import inside

SUPIR = """
import os
import tempfile
import torch
from zerowaste_vae.engine import Checkpoint, read_checkpoint
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.host import EngineVAE
from zerowaste_vae.nodes.settings import Settings
torch.manual_seed(0)
key, x = "encoder.down_blocks.1.resnets.0.conv1.weight", torch.rand(1, 32, 32, 3)

def other():
    stored = read_checkpoint(vae_file)
    tensors = dict(stored.tensors)
    named = next(k for k in tensors if k.endswith("down_blocks.1.resnets.0.conv1.weight"))
    tensors[named] = -tensors[named]
    return Checkpoint(tensors, stored.metadata)

def around(vae):
    # As the node that encodes with SUPIR's encoder.
    weights = vae.engine.model.state_dict()
    name = next(k for k in weights if "down_blocks.1.resnets.0.conv1" in k and k.endswith("weight"))
    own, vae.patcher = vae.patcher, vae.patcher.clone()
    vae.patcher.add_patches({name: (-weights[name].float().cpu(),)}, strength_patch=1.0, strength_model=0.0)
    try:
        return vae.encode(x)
    finally:
        vae.patcher = own

def files():
    folder = Path(os.environ["ZEROWASTE_CACHE"])
    return sorted(p.parent.name for p in folder.rglob("*.safetensors"))

with torch.inference_mode():
    expected = []
    for source in (lambda: read_checkpoint(vae_file), other):
        os.environ["ZEROWASTE_CACHE"] = tempfile.mkdtemp()
        expected.append(EngineVAE(source, precision, Settings()).encode(x))
    assert not torch.equal(*expected)
    os.environ["ZEROWASTE_CACHE"] = tempfile.mkdtemp()
    vae = conversion.from_file(vae_file, precision, None, Settings())
    calls = [vae.encode, around] if first == "plain" else [lambda x: around(vae), vae.encode]
    for turn in range(4):
        plain = (turn % 2 == 0) == (first == "plain")
        found = vae.encode(x) if plain else around(vae)
        assert torch.equal(found, expected[0 if plain else 1]), (turn, plain)
    assert len(set(files())) <= 1, files()
    again = conversion.from_file(vae_file, precision, None, Settings())
    assert torch.equal(again.encode(x), expected[0])
print("followed")
"""

CHANGED = """
import torch
import comfy.sd
from comfy.ldm.wan.vae import WanVAE
from zerowaste_vae.engine import log
from zerowaste_vae.nodes.conversion import CHANGED, engine_vae
from zerowaste_vae.nodes.decode import Decode
z = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
shape = dict(dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
draw, weights = torch.Generator().manual_seed(0), {}
for key, p in WanVAE(dim=8, z_dim=16, image_channels=3, conv_out_channels=3, **shape).state_dict().items():
    noise = torch.randn(p.shape, generator=draw)
    gain = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
    weights[key] = 1 + 0.1 * noise if key.endswith("gamma") else noise * gain
with torch.inference_mode(change.endswith("inference")):
    vae = comfy.sd.VAE(sd=dict(weights))
    network = vae.first_stage_model
    layer = next(m for m in network.decoder.modules() if isinstance(m, torch.nn.Conv3d) and m.weight.shape[0] >= 16)
    before, outcome = Decode.execute({"samples": z}, vae).args[:2]
    assert engine_vae(vae) is not None and engine_vae(vae) is engine_vae(vae)
    first = engine_vae(vae)
    vae.decode(z)  # the host loads it, and may put other tensors in the place of its own
    assert engine_vae(vae) is first, "converted anew"
    followed = True
    if change.startswith("in place"):
        with torch.no_grad():
            layer.weight.mul_(-1)
    elif change == "data":
        layer.weight.data.mul_(-1)
    elif change == "replaced":
        layer.weight = torch.nn.Parameter(-layer.weight.detach(), requires_grad=False)
    elif change.startswith("load_state_dict"):
        network.load_state_dict({k: v * 0.9 for k, v in network.state_dict().items()})
    elif change == "network":
        vae.first_stage_model = comfy.sd.VAE(sd={k: v * 0.9 for k, v in weights.items()}).first_stage_model
    else:
        followed = False
        if change == "network.decode":
            decode = network.decode
            network.decode = lambda *a, **k: -decode(*a, **k)
        elif change == "decode":
            decode = vae.decode
            vae.decode = lambda *a, **k: 1 - decode(*a, **k)
        elif change == "process_output":
            vae.process_output = lambda image: image.add_(1.0).div_(4.0).clamp_(0.0, 1.0)
        elif change == "patches":
            name = next(k for k, p in network.named_parameters() if p is layer.weight)
            vae.patcher.add_patches({name: (-layer.weight.detach().clone(),)}, 1.0, 0.0)
    said = []
    log.once = lambda message, say=None: said.append(message)
    after, outcome = Decode.execute({"samples": z}, vae).args[:2]
    theirs = vae.decode(z).flatten(0, 1)
    assert (after.float() - theirs.float()).abs().max() < 0.02, (after - theirs).abs().max()
    assert (after - before).abs().max() > 0.05, "as before"
    assert (engine_vae(vae) is not None) == followed
    assert (CHANGED in outcome) == (not followed), outcome
    if not followed:
        assert any("ComfyUI's own code" in message for message in said), said
    if change == "patches":
        vae.patcher.patches.clear()
        vae.patcher.patches_uuid = __import__("uuid").uuid4()
        assert engine_vae(vae) is None, "the weights are patched still"
        vae.decode(z)
        assert engine_vae(vae) is first, "converted anew"
        assert torch.equal(Decode.execute({"samples": z}, vae).args[0], before)
print("as the host")
"""


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "fp8"])
@pytest.mark.parametrize("first", ["plain", "patched"])
def test_patches_around_an_encode(host_places, pack_folder, precision, first):
    assert "followed" in inside(host_places, pack_folder, f"precision, first = {precision!r}, {first!r}" + SUPIR)


@pytest.mark.parametrize("change", [
    "in place", "in place, inference", "data", "replaced", "load_state_dict", "load_state_dict, inference", "network",
    "network.decode", "decode", "process_output", "patches",
])  # fmt: skip
def test_a_vae_of_the_host_that_was_changed(host_places, pack_folder, change):
    assert "as the host" in inside(host_places, pack_folder, f"change = {change!r}" + CHANGED)
