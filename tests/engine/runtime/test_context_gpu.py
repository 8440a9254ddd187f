"""On a real GPU: every placement of histories gives the same bits, and 16 GB hold what plans for 13 GB say."""

import json
from dataclasses import replace

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.runtime.parking import SPARE_BYTES, Parked, Parking
from zerowaste_vae.engine.runtime.pinned import POOL
from zerowaste_vae.engine.system.memory import GIB

from ..gpu_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("seedvr2-tiny", "seedvr2")


@pytest.fixture(scope="module")
def vae(full_width):
    """Published widths in fp16."""
    return load(full_width, "fp16", "cuda")


@pytest.fixture
def follow(vae, monkeypatch):
    """Make every decode and encode use the given steps and parking."""

    def use(steps, parking):
        plain = vae.planner.plan

        def plan(half, *args, **options):
            return replace(plain(half, *args, **options), steps=steps, parking=parking)

        monkeypatch.setattr(vae.planner, "plan", plan)

    return use


SOME = frozenset(
    f"{half}.{key}"
    for half in ("decoder", "encoder")
    for key in (
        "conv_in", "up_blocks.0.upsamplers.0.conv", "up_blocks.2.upsamplers.0.conv", "up_blocks.3.resnets.1.conv2",
        "conv_out", "down_blocks.0.resnets.1.conv1", "down_blocks.1.downsamplers.0.conv",
    )
)  # fmt: skip
PLACEMENTS = [
    (Steps(1, 1), Parking(None, 0)),
    (Steps(1, 1), Parking(None, 0, buffers=3)),
    (Steps(2, 3), Parking(None, 1 << 30, buffers=3)),
    (Steps(1, 4), Parking(None, 0, rows=128)),
    (Steps(2, 2), Parking(SOME, 8 << 20, buffers=3)),
    (Steps(1, 1), Parking(SOME, 0, prefetch=False)),
    (Steps(2, 4), Parking(None, 0, buffers=3, near=16 << 20)),
    (Steps(1, 2), Parking(None, 0, near=40 << 20)),
    (Steps(2, 4), Parking(None, 8 << 20, buffers=4, near=24 << 20)),
]


@pytest.fixture(scope="module", params=[(42, 27), (37, 60)], ids=str)
def usual(request, vae):
    """(latent, video, frames, latents) as the planner would have them."""
    height, width = request.param
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 16, 4, height, width, generator=generator).half()
    video = torch.randn(13, 8 * height + 5, 8 * width + 3, 3, generator=generator)
    video = (video * 50 + 128).clamp(0, 255).byte()
    return z, video, vae.decode(z), vae.encode(video)


@pytest.mark.parametrize(("steps", "parking"), PLACEMENTS)
def test_every_placement_has_the_same_bits(vae, usual, follow, monkeypatch, steps, parking):
    z, video, frames, latent = usual
    follow(steps, parking)
    uses = []
    enter = Parked.enter
    monkeypatch.setattr(Parked, "enter", lambda self, *use: uses.append(use) or enter(self, *use))
    assert torch.equal(vae.decode(z), frames)
    assert uses
    uses.clear()
    assert torch.equal(vae.encode(video), latent)
    assert uses


CAP = 16


@pytest.fixture
def capped():
    """This process may reserve no more, until the test ends (gpu_as_found in tests/conftest.py)."""
    torch.cuda.set_per_process_memory_fraction(CAP * GIB / torch.cuda.get_device_properties(0).total_memory)


@pytest.fixture
def settled(vae):
    """Nothing of earlier tests is left on the GPU. Page-locked host memory is: locking takes time."""
    vae.release_packed()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return vae


#: Half, height, width, latents, target in GB; the host memory that all are decoded with.
CASES = [("decode", 1440, 2560, 2, 13), ("decode", 720, 1280, 4, 13), ("decode", 720, 1280, 4, 8),
         ("decode", 720, 1280, 4, 4), ("decode", 720, 1280, 4, 3), ("decode", 1080, 1920, 4, 13),
         ("decode", 1080, 1920, 3, 8), ("decode", 1080, 1920, 3, 4.5), ("decode", 1200, 1600, 3, 6),
         ("encode", 720, 1280, 4, 13), ("encode", 720, 1280, 4, 3), ("encode", 1080, 1920, 3, 8)]  # fmt: skip
ROOM = 62


@pytest.fixture(scope="module")
def locked(vae):
    """Host memory for the one that parks most, locked once: whichever comes first, it is there for all. At 3840x2160 it
    would be 56 GB."""
    most = max(
        vae.plan_decode(latents, height // 8, width // 8, vram_gb=gb, ram_gb=ROOM, output="uint8").host_bytes
        for half, height, width, latents, gb in CASES if half == "decode"
    )  # fmt: skip
    POOL.give(POOL.take(most, SPARE_BYTES))


@pytest.mark.parametrize(("half", "height", "width", "latents", "gb"), CASES)
def test_reserved_memory_meets_the_stated_peak(settled, locked, noise, capped, half, height, width, latents, gb):
    vae, size = settled, (latents, height // 8, width // 8)
    if half == "decode":
        options = {"vram_gb": gb, "ram_gb": ROOM, "output": "uint8"}
        plan, source = vae.plan_decode(*size, **options), noise(1, 16, *size).half()
    else:
        options = {"vram_gb": gb}
        plan = vae.plan_encode(*size, **options)
        source = torch.randint(256, (4 * latents - 3, height, width, 3), dtype=torch.uint8)
    run = getattr(vae, half)
    result = run(source, **options)
    reserved, stats = torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()
    print(f"{half} {width}x{height} {gb} GB: {plan.describe()}; reserved {reserved / GIB:.2f} GB")
    assert stats["num_alloc_retries"] == stats["num_ooms"] == 0
    assert reserved <= gb * GIB
    assert abs(reserved - plan.peak_bytes) <= 0.05 * plan.peak_bytes
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(result, run(source, **{**options, "vram_gb": 100}))


@pytest.mark.parametrize(("height", "width"), [(727, 1287), (1085, 1926)])
def test_pixels_that_fill_no_latent_are_stated(settled, height, width):
    foreign = torch.cuda.memory_allocated()
    size, rest = (2, height // 8, width // 8), (height % 8, width % 8)
    plan = settled.plan_encode(*size, vram_gb=100, rest=rest)
    settled.encode(torch.randint(256, (5, height, width, 3), dtype=torch.uint8), vram_gb=100)
    allocated = torch.cuda.max_memory_allocated() - foreign
    print(f"encode {width}x{height}: {plan.describe()}; allocated {allocated / GIB:.2f} GB")
    assert allocated <= plan.peak_bytes


@pytest.mark.parametrize(("height", "width"), [(3072, 2048), (2304, 4096)])
def test_attention_takes_no_more_than_is_stated(noise, height, width):
    """At these sizes a call once took 124 MiB more than the run's own memory, whatever the widths: these are narrow,
    and need 11 GB instead of 91."""
    vae = make("seedvr2-tiny", "fp16")
    foreign = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    size = 1, height // 8, width // 8
    plan = vae.plan_decode(*size, vram_gb=20, tiling="untiled", output="uint8")
    vae.decode(noise(1, 16, *size).half(), vram_gb=20, tiling="untiled", output="uint8")
    assert vae.last_report.mode.startswith("fused")
    allocated = torch.cuda.max_memory_allocated() - foreign
    print(f"decode {width}x{height}: {plan.describe()}; allocated {allocated / GIB:.2f} GB")
    assert allocated <= plan.peak_bytes


def test_host_memory_of_long_clips(own_process):
    """317 frames of 720p: the output and less than 2 GB besides; 77 with histories parked: what the plan says more,
    unless it is there already. A second copy in float32 would be 3.5 GB."""
    done = own_process()
    whole, parked = (json.loads(line) for line in done.stdout.splitlines())
    for clip in (whole, parked):
        print({name: f"{size / GIB:.2f} GB" for name, size in clip.items()})
        assert clip["more"] <= clip["bytes"] + max(0, clip["stated"] - clip["idle"]) + 2 * GIB
    assert (whole["bytes"], parked["bytes"]) == (317 * 720 * 1280 * 3, 77 * 720 * 1280 * 3)
    assert parked["stated"] > GIB > whole["stated"]
