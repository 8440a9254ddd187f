"""The pack's VAE inside a host that says it has a GPU: plans, giving memory back, scoped settings."""

from running import inside

PLAN = """
import torch
claim_gpus()
gpu = torch.device("cuda", 0)
from zerowaste_vae.engine.planning import choice
choice.Choices.of = lambda *_: None  # nothing lacks kernels
from zerowaste_vae.engine.execution import core
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.settings import Settings
asked = []
core.why_off = lambda name, config, dtype, device, *_: asked.append((dtype, device))
vae = conversion.from_file(vae_file, "auto", None, Settings())
assert (vae.engine.precision, vae.engine.device) == ("fp16", gpu), (vae.engine.precision, vae.engine.device)
assert all(p.device.type == "cpu" for p in vae.engine.model.parameters())
vae.memory_used_decode((1, 16, 2, 8, 8), torch.float16)
assert asked and set(asked) == {(torch.float16, gpu)}, asked
print("planned for", gpu)
"""

ONCE = """
import torch
from zerowaste_vae.engine.planning.planner import Planner
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.nodes import conversion, host
from zerowaste_vae.nodes.settings import Settings
host.EngineVAE._on_gpu = True  # room is made there
host.sampled = lambda: Machine.bare(torch.device("cpu"), 64 << 30)
made, plan = [], Planner.plan
Planner.plan = lambda *args, **options: made.append(plan(*args, **options)) or made[-1]
def plans(run, given):
    made.clear()
    result, outcome = run(given, Settings(chunk=1))
    assert outcome.report.plan == made[-1].describe(), (outcome.report.plan, made)
    return result, len(made)
z = torch.randn(1, 16, 2, 4, 4)
vae = conversion.from_file(vae_file, "auto", None, Settings())
frames, decode = plans(vae.run_decode, z)
_, encode = plans(vae.run_encode, torch.nn.functional.pad(frames, (0, 0, 0, 3, 0, 5)))
vae = conversion.from_file(vae_file, "int8", None, Settings())
print("plans:", decode, encode, *(plans(vae.run_decode, z)[1] for _ in range(2)))
"""

FREED = """
import comfy.model_management as mm
import torch
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.runtime.pinned import POOL
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.settings import Settings
vae = conversion.from_file(vae_file, "auto", None, Settings())
other = vae.with_wishes(Settings(), Options(composed_upsample=False))
assert other.engine is not vae.engine and other.patcher is vae.patcher
mm.load_models_gpu([vae.patcher], force_full_load=True)
vae.engine._fused.decoder()
packed = vae.engine.packed_bytes
loaded = vae.patcher.loaded_size()
assert vae.patcher.partially_unload(torch.device("cpu"), packed) == packed > 0 == vae.engine.packed_bytes
assert vae.patcher.loaded_size() == loaded
vae.engine._fused.decoder()
assert vae.patcher.partially_unload(torch.device("cpu"), packed + 1) > packed
assert vae.patcher.loaded_size() < loaded
for engine in (vae.engine, other.engine):
    engine._fused.decoder()
    assert engine._fused.packed_bytes("decoder") > 0
POOL.give(POOL.take(1 << 20))
assert POOL.nbytes > 0
mm.unload_all_models()
assert not any(engine._fused.packed_bytes("decoder") for engine in (vae.engine, other.engine))
assert POOL.nbytes == 0
print("given back")
"""

KEPT = """
import comfy.model_management as mm
import torch
from zerowaste_vae.engine.options import Options
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.settings import Settings
vae = conversion.from_file(vae_file, "int8", None, Settings())
z = torch.randn(1, 16, 2, 4, 4)
frames = vae.decode(z)
packed = vae.engine._fused._packed["decoder"]
assert torch.equal(vae.decode(z), frames) and vae.engine._fused._packed["decoder"] is packed
vae.encode(frames[0])
assert list(vae.engine._fused._packed) == ["encoder"]
other = vae.with_wishes(Settings(), Options(composed_upsample=False))
other.decode(z)
assert vae.engine.packed_bytes == 0 < other.engine.packed_bytes
mm.unload_all_models()
assert other.engine.packed_bytes == 0
print("kept")
"""

GRAPHS = """
import torch
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.settings import Settings

class Graphs:
    nbytes, device, freed = 1 << 20, torch.device("cpu"), 0
    def free(self):
        self.freed += 1

def leave(call):
    def run(*args, **options):
        result = call(*args, **options)
        KEPT.keep(left[-1])  # as a call that was worth it does
        return result
    return run

vae, left = conversion.from_file(vae_file, "auto", None, Settings()), []
for call, given in (("decode", torch.randn(1, 16, 2, 4, 4)), ("encode", torch.rand(5, 32, 32, 3))):
    left.append(Graphs())
    setattr(vae.engine, call, leave(getattr(vae.engine, call)))
    getattr(vae, call)(given)
    assert left[-1].freed == 1 and KEPT.nbytes(torch.device("cpu")) == 0, call
print("nothing kept")
"""

SCOPED = """
import torch
from zerowaste_vae.engine.kernels.precision import tf32_asked
from zerowaste_vae.engine.options import Options
from zerowaste_vae.nodes import conversion

class Unknown:
    device, vae_dtype = torch.device("cuda", 0), torch.float32
    def decode(self, samples):
        return torch.backends.cudnn.benchmark, tf32_asked()
    decode_tiled = encode = encode_tiled = decode

conversion.availability = lambda *_: {"tf32": None, "cudnn_benchmark": None}
vae = Unknown()
before = vars(vae).copy()
state = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
same, names = conversion.with_scoped_settings(vae, Options())
assert same is vae and names == []
scoped, names = conversion.with_scoped_settings(vae, Options(cudnn_benchmark=True))
assert names == ["cudnn_benchmark"], names
assert scoped is not vae and vars(vae) == before
assert scoped.decode(0) == (True, False)
assert vae.decode(0) == (False, False)
scoped, names = conversion.with_scoped_settings(vae, Options(tf32=True))
assert scoped.encode_tiled(0) == (False, True)
assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == state
assert not torch.backends.cudnn.benchmark and not tf32_asked()
conversion.availability = lambda *_: {"tf32": "no", "cudnn_benchmark": "no"}
assert conversion.with_scoped_settings(vae, Options(tf32=True, cudnn_benchmark=True)) == (vae, [])
print("scoped")
"""

CONVERTED = """
import gc
import weakref
import comfy.sd
import torch
from comfy.ldm.wan.vae import WanVAE
from zerowaste_vae.engine import InputError
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.decode import Decode
shape = dict(dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
weights = WanVAE(dim=4, z_dim=16, image_channels=3, conv_out_channels=3, **shape).state_dict()
stock = comfy.sd.VAE(sd={key: torch.randn_like(t) for key, t in weights.items()})
before, sums = dict(vars(stock)), {key: t.sum().item() for key, t in stock.get_sd().items()}
ours = conversion.engine_vae(stock)
assert ours is conversion.engine_vae(stock) is conversion.engine_vae(ours)
Decode.execute(samples={"samples": torch.randn(1, 16, 2, 4, 4)}, vae=stock)
assert vars(stock) == before and {key: t.sum().item() for key, t in stock.get_sd().items()} == sums
died = weakref.ref(stock), weakref.ref(ours)
del stock, ours, before
gc.collect()
assert [ref() for ref in died] == [None, None]
try:
    conversion.engine_vae(None)
except InputError as error:
    assert "no VAE" in str(error)
from zerowaste_vae.nodes import conversion
said = []
conversion.log.once.__defaults__ = (said.append,)
weights = WanVAE(dim=4, z_dim=16, image_channels=3, conv_out_channels=1, **shape).state_dict()
odd = comfy.sd.VAE(sd={key: torch.randn_like(t) for key, t in weights.items()})
assert conversion.engine_vae(odd) is conversion.engine_vae(odd) is None
assert len(said) == 1 and said[0].startswith("WanVAE runs by ComfyUI's own code: decoder.head.2.bias is for 1"), said
print("converted once")
"""

CHOSEN = """
import comfy.sd
import torch
from comfy.ldm.wan.vae import WanVAE
from zerowaste_vae.engine.execution import core
from zerowaste_vae.nodes import conversion
core.why_off = lambda *_: None
shape = dict(dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
weights = WanVAE(dim=4, z_dim=16, image_channels=3, conv_out_channels=3, **shape).state_dict()
stock = comfy.sd.VAE(sd={key: torch.randn_like(t) for key, t in weights.items()}, device=torch.device("cpu"))
claim_gpus(2)
for device in (torch.device("cpu"), torch.device("cuda", 1)):
    stock.device = stock.patcher.load_device = device
    ours = conversion.from_host_vae(stock, "auto")
    assert ours.device == ours.engine.device == conversion.with_precision(ours, "bf16").device == device, ours.device
print("where it was put")
"""

STACKED = """
claim_gpus()
from zerowaste_vae.engine.execution import core
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.nodes import conversion
from zerowaste_vae.nodes.loader import Optimize
from zerowaste_vae.nodes.settings import Settings
targets.triton_version, core.why_off = lambda: (3, 6), lambda *_: None
from zerowaste_vae.engine.planning import choice
choice.Choices.of = lambda *_: None  # nothing lacks kernels
vae = conversion.from_file(vae_file, "auto", None, Settings())
for first in ({"fp8": True}, {"min_db": 20.0}):
    once = Optimize.execute(vae, **first)[0]
    assert once.engine.precision == "fp8", once.engine.precision
    twice = Optimize.execute(once, precision="fp8")[0]
    assert twice.engine.precision == "fp8", (first, twice.engine.precision)
print("still fp8")
"""

TRIMMED = """
import torch
from comfy_api.latest import InputImpl
from zerowaste_vae.nodes.encode import _Frames
clip = str(vae_file.parent / "demo_clip.mp4")
full = InputImpl.VideoFromFile(clip).get_components().images
def which(frames):
    return [int((full - frame[None]).abs().mean((1, 2, 3)).argmin()) for frame in frames]
if hasattr(InputImpl.VideoFromFile, "as_trimmed"):
    for start, length in ((0.5, 0.5), (-0.5, 0), (-0.5, 0.2), (0.1, 0.1), (0.45, 0.3), (0.04, 0.05), (0.9, 5)):
        video = InputImpl.VideoFromFile(clip).as_trimmed(start, length, strict_duration=False)
        host = which(video.get_components().images)
        ours = which(frame.float() / 255 for frame in _Frames(video, 0, 0))
        assert host == ours, (start, length, host, ours)
print("the same frames")
"""

PINNED = """
from zerowaste_vae.engine.runtime import pinned
from zerowaste_vae.nodes.services import machine
assert not pinned._forbidden
machine()
print("forbidden:", pinned._forbidden)
"""


def test_plans_are_made_for_the_device_of_the_run(host_places, pack_folder):
    """The weights start offloaded; a plan for the device they lie on would be for other kernels and another size."""
    assert "planned for cuda:0" in inside(host_places, pack_folder, PLAN)


def test_room_is_made_for_the_plan_that_runs(host_places, pack_folder):
    """A second one is made where a first clip settles what is computed in 8 bit."""
    said = inside(host_places, pack_folder, ONCE).splitlines()[-1]
    assert said in ("plans: 1 1 2 1", "plans: 1 1 1 1")


def test_unloading_gives_back_what_the_host_does_not_see(host_places, pack_folder):
    """Packed weights of every VAE that shares the unloaded weights, and page-locked memory."""
    assert "given back" in inside(host_places, pack_folder, FREED)


def test_packed_weights_stay_with_a_loaded_vae(host_places, pack_folder):
    """Those of the half, and of the options, that ran last: no others are in the plan of a run."""
    assert "kept" in inside(host_places, pack_folder, KEPT)


def test_nodes_leave_no_graphs_behind(host_places, pack_folder):
    """The memory they replay in, of which the host knows nothing."""
    assert "nothing kept" in inside(host_places, pack_folder, GRAPHS)


def test_settings_of_an_unknown_vae(host_places, pack_folder):
    """They hold during its calls only."""
    assert "scoped" in inside(host_places, pack_folder, SCOPED)


def test_life_of_a_conversion(host_places, pack_folder):
    """And the VAE that goes in is not changed by being used. Sizes that the engine does not run are the host's."""
    assert "converted once" in inside(host_places, pack_folder, CONVERTED)


def test_the_hosts_option_against_page_locking_holds_for_us(host_places, pack_folder):
    assert "forbidden: --disable-pinned-memory" in inside(host_places, pack_folder, PINNED, "--disable-pinned-memory")


def test_chosen_device_is_kept(host_places, pack_folder):
    """A VAE stays on the device that was chosen for it."""
    assert "where it was put" in inside(host_places, pack_folder, CHOSEN)


def test_8_bit_stays_where_it_was_chosen(host_places, pack_folder):
    """By an Optimize behind another one, whose options say nothing of it."""
    assert "still fp8" in inside(host_places, pack_folder, STACKED)


def test_a_trimmed_video_has_the_hosts_frames(host_places, pack_folder):
    assert "the same frames" in inside(host_places, pack_folder, TRIMMED)
