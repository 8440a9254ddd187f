"""The pack's VAE asks the host for room before a run, inside a host that says it has a GPU."""

from running import inside

ON_A_GPU = """
import contextlib
import torch
import comfy.model_management as mm
claim_gpus()
gpu = torch.device("cuda", 0)
mm.get_total_memory = lambda *_: 16 << 30
from zerowaste_vae.engine import PlanError
from zerowaste_vae.engine.execution import core
from zerowaste_vae.engine.planning import choice
from zerowaste_vae.nodes import conversion
choice.Choices.of = lambda *_: None  # nothing lacks kernels
from zerowaste_vae.nodes import services
from zerowaste_vae.nodes.settings import Settings
core.why_off = lambda *_: None
asked = []
mm.load_models_gpu = lambda models, memory_required, **_: asked.append(memory_required + vae.patcher.model_size() * 1.1)
mm.extra_reserved_memory = lambda: 0
mm.cuda_device_context = contextlib.nullcontext
free, freed = 1 << 50, []
mm.get_free_memory = lambda device: free
mm.free_memory = lambda memory, device, keep_loaded=(): freed.append((memory, device, keep_loaded))
mm.soft_empty_cache = lambda: freed.append("cache")
vae = conversion.from_file(vae_file, "auto", None, Settings())
vae.engine.to = lambda device: None
size = (1, 4, 135, 240)
untiled = vae._peak("decoder", size)

def room(**wishes):
    with vae._loaded("decoder", size, Settings(**wishes).options()) as (plan, notes):
        spare = services.bare(gpu).spare(not wishes.get("vram_gb"))
        assert abs(plan.peak_bytes + spare - asked.pop()) <= 1 and notes() == []
    return plan.peak_bytes

"""

PARKED = """
assert room() == untiled
gb = 0.5 * untiled / 2**30
assert 0 < room(vram_gb=gb) <= 0.5 * untiled
assert room(tiling="exact", tile=256) > 0
assert 0 < room(vram_gb=gb, ram_gb=0.01) <= 0.5 * untiled  # blended tiles
try:
    room(vram_gb=gb, ram_gb=0.01, tiling="untiled")
except PlanError as error:
    assert "ram_gb" in str(error), error
else:
    raise AssertionError("no host memory, and still a plan")
assert not freed
print("made room")
"""

#: A VAE without a GPU asks for nothing.
NO_GPU = """
vae.patcher.load_device = vae.device = torch.device("cpu")
free = 0
with vae._loaded("decoder", size, Settings().options()) as (plan, notes):
    assert plan is None and asked == [vae.patcher.model_size() * 1.1] and not freed and notes() == []
print("nothing")
"""

def test_room_is_made_for_plans_that_park(host_places, pack_folder):
    """Histories in host memory count there as well: else a target that needs them is refused before the run."""
    assert "made room" in inside(host_places, pack_folder, ON_A_GPU + PARKED)


def test_no_room_is_made_without_a_gpu(host_places, pack_folder):
    assert "nothing" in inside(host_places, pack_folder, ON_A_GPU + NO_GPU)


PINNED = """
import torch
from types import SimpleNamespace
import comfy.model_management as mm
from zerowaste_vae.nodes import services
from zerowaste_vae.engine.runtime import pinned
locked = []
torch.cuda.is_available = lambda: True
torch.cuda.cudart = lambda: SimpleNamespace(
    cudaHostRegister=lambda at, *_: locked.append(at) or 0, cudaHostUnregister=lambda at: locked.remove(at) or 0)
pinned.PIECE = pinned.PAGE
counts, before = hasattr(mm, "ensure_pin_registerable"), getattr(mm, "TOTAL_PINNED_MEMORY", 0)
if counts:
    mm.MAX_PINNED_MEMORY = before + 3.5 * pinned.PAGE
pinned.POOL.give(pinned.POOL.take(5 * pinned.PAGE))
assert len(locked) == (3 if counts else 5), locked
assert getattr(mm, "TOTAL_PINNED_MEMORY", 0) == before + (3 * pinned.PAGE if counts else 0)
pinned.POOL.release()
assert not locked and getattr(mm, "TOTAL_PINNED_MEMORY", 0) == before
print("counted")
"""


def test_page_locked_memory_is_counted_with_the_hosts(host_places, pack_folder):
    """Up to the host's limit, in hosts that have one."""
    assert "counted" in inside(host_places, pack_folder, PINNED)
