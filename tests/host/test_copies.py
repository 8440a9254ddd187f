"""Packs and the host copy a VAE of ours, or the host's before us, choose its device, change its layers, let it go."""

from running import inside

GONE = """
import gc
import weakref
import comfy.model_management as mm
import torch
from zerowaste_vae.engine.options import Options
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.settings import Settings
gc.collect()
gc.disable()
for precision in ("auto", "int8"):
    vae = conversion.from_file(vae_file, precision, None, Settings())
    other = vae.with_wishes(Settings(), Options(composed_upsample=False))
    for one in (vae, other):
        one.encode(one.decode(torch.randn(1, 16, 2, 4, 4))[0])
    here = [weakref.ref(x) for v in (vae, other) for x in (v, v.engine, v.engine.planner, v.patcher, v.engine.model)]
    here += map(weakref.ref, vae.engine.model.parameters())
    del vae, other, one
    assert [ref() for ref in here if ref() is not None] == [], precision
    assert mm.current_loaded_models == [] or all(m.model is None for m in mm.current_loaded_models)
print("gone at once")
"""

COPIED = """
import copy
import torch
from zerowaste_vae.engine.options import Options
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.settings import Settings
vae = conversion.from_file(vae_file, "auto", None, Settings(chunk=1))
vae = vae.with_wishes(vae.settings, Options(composed_upsample=False))
z = torch.randn(1, 16, 2, 4, 4)
frames, own, shared = vae.decode(z), copy.deepcopy(vae), copy.copy(vae)
assert own.settings == vae.settings and own.engine.options == vae.engine.options
assert own.engine.model is not vae.engine.model and own.patcher is not vae.patcher
assert shared.engine is vae.engine
with torch.no_grad():
    for p in vae.engine.model.parameters():
        p.zero_()
assert torch.equal(own.decode(z), frames)
del vae
assert shared.memory_used_decode(z.shape, z.dtype) > 0
assert not torch.equal(shared.first_stage_model.decode(z), own.first_stage_model.decode(z))
print("copied")
"""

SELECTED = """
import comfy.model_management as mm
import torch
try:
    from comfy_extras.nodes_multigpu import SelectVAEDeviceNode
except ImportError:
    print("selected: this host has no such node")
    raise SystemExit
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.loader import Optimize
from zerowaste_vae.nodes.settings import Settings
vae = conversion.from_file(vae_file, "int8", None, Settings())
z = torch.randn(1, 16, 2, 4, 4)
frames = vae.decode(z)
chosen = SelectVAEDeviceNode.execute(Optimize.execute(vae)[0], "default")[0]
del vae
assert torch.equal(chosen.decode(z), frames)
assert torch.equal(chosen.first_stage_model.decode(z), frames.mul(2).sub(1).movedim(-1, 1))
assert chosen.memory_used_decode(z.shape, z.dtype) > 0
packed = chosen.engine.packed_bytes
assert chosen.patcher.partially_unload(torch.device("cpu"), packed) == packed > 0 == chosen.engine.packed_bytes
chosen.decode(z)
mm.unload_all_models()
assert chosen.engine.packed_bytes == 0
assert torch.equal(Optimize.execute(chosen)[0].decode(z), frames)
print("selected")
"""

ALTERED = """
import copy
import comfy.sd
import torch
from comfy.ldm.wan.vae import WanVAE
from zerowaste_vae.engine import InputError
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.decode import Decode
from zerowaste_vae.nodes.loader import Optimize
from zerowaste_vae.nodes.settings import Settings
shape = dict(dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
weights = WanVAE(dim=4, z_dim=16, image_channels=3, conv_out_channels=3, **shape).state_dict()
stock = comfy.sd.VAE(sd={key: torch.randn_like(t) / t[0].numel() ** 0.5 for key, t in weights.items()})
z = torch.randn(1, 16, 2, 4, 4)
def pad(vae, mode, kind=torch.nn.Conv2d):
    for layer in vae.first_stage_model.modules():
        if isinstance(layer, kind):
            layer.padding_mode = mode
usual = stock.decode(z)
for converted in (False, True):
    if converted:
        assert conversion.engine_vae(stock) is not None
    pad(stock, "circular")
    around = stock.decode(z)
    assert (around - usual).abs().max() > 1e-3
    assert conversion.engine_vae(stock) is None
    assert Optimize.execute(stock)[0] is stock
    assert torch.equal(Decode.execute(samples={"samples": z}, vae=stock)[0], around.reshape(-1, *around.shape[-3:]))
    pad(stock, "zeros")
assert conversion.engine_vae(stock) is not None
ours = conversion.from_file(vae_file, "auto", None, Settings())
pad(ours, "circular", torch.nn.Conv3d)
for call in (lambda: ours.decode(z), lambda: ours.encode(torch.rand(1, 16, 16, 3))):
    try:
        call()
    except InputError as error:
        assert "Another node has changed the layer" in str(error), error
    else:
        raise AssertionError("not followed, and not a word")
print("not in silence")
"""


def test_a_vae_nobody_has_is_gone_at_once(host_places, pack_folder):
    """And not when the garbage collector comes: until then the host would count its weights as in use."""
    assert "gone at once" in inside(host_places, pack_folder, GONE)


def test_copies_of_a_vae(host_places, pack_folder):
    """Packs copy a VAE before they change it: a deep copy has weights of its own, any other shares them, and lives on
    without the first."""
    assert "copied" in inside(host_places, pack_folder, COPIED)


def test_select_vae_device_behind_ours(host_places, pack_folder):
    """The host's node clones the patcher and sets the network that this has."""
    assert "selected" in inside(host_places, pack_folder, SELECTED)


def test_networks_that_other_nodes_have_changed(host_places, pack_folder):
    """For pictures without seams packs let convolutions go round: of the host's VAE its own code then runs, ours says
    so."""
    assert "not in silence" in inside(host_places, pack_folder, ALTERED)
