"""On a real GPU: every placement of histories gives the same bits, and 16 GB hold what plans for 13 GB say."""

import gc
import os

import pytest
import torch
from zerowaste_vae.engine.fused.parking import Parked, Parking
from zerowaste_vae.engine.models.seedvr2 import ARCHITECTURE, Config, SeedVR2
from zerowaste_vae.engine.runtime.memory import GIB
from zerowaste_vae.engine.runtime.pinned import POOL
from zerowaste_vae.engine.runtime.stream import Steps
from zerowaste_vae.engine.vae import VideoVAE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.fixture(scope="module")
def vae(seed_model):
    """Published widths in fp16."""
    model = SeedVR2(Config((128, 256, 512, 512), (128, 256, 512, 512)))
    seed_model(model, 1234)
    model.requires_grad_(False).to("cuda", torch.float16)
    return VideoVAE(model, ARCHITECTURE, "fp16", torch.float16, torch.device("cuda"))


@pytest.fixture
def follow(vae, monkeypatch):
    """Make every decode and encode use the given steps and parking."""

    def use(steps, parking):
        plain = vae.planner.plan

        def plan(half, *args, **options):
            from dataclasses import replace

            return replace(plain(half, *args, **options), steps=steps, parking=parking)

        monkeypatch.setattr(vae.planner, "plan", plan)

    yield use
    monkeypatch.undo()


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


@pytest.mark.parametrize(("height", "width"), [(42, 27), (37, 60)])
@pytest.mark.parametrize(("steps", "parking"), PLACEMENTS)
def test_every_placement_has_the_same_bits(vae, follow, noise, monkeypatch, steps, parking, height, width):
    z = noise(2, 16, 4, height, width).half()
    video = (noise(13, 8 * height + 5, 8 * width + 3, 3) * 50 + 128).clamp(0, 255).byte()
    frames, latent = vae.decode(z), vae.encode(video)
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
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(CAP * GIB / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def settled(vae):
    """Nothing of earlier tests is left on the GPU. Page-locked host memory is: locking it takes 0.7 s a GB."""
    vae._fused.release()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return vae


@pytest.mark.parametrize(
    ("half", "height", "width", "latents", "gb"),
    # The one that parks most comes first: all others find its host memory locked.
    [("decode", 2160, 3840, 2, 13), ("decode", 720, 1280, 4, 13), ("decode", 720, 1280, 4, 8),
     ("decode", 720, 1280, 4, 4), ("decode", 720, 1280, 4, 3), ("decode", 1080, 1920, 4, 13),
     ("decode", 1080, 1920, 3, 8), ("decode", 1080, 1920, 3, 4.5), ("decode", 1200, 1600, 3, 6),
     ("encode", 720, 1280, 4, 13), ("encode", 720, 1280, 4, 3), ("encode", 1080, 1920, 3, 8)],
)  # fmt: skip
def test_reserved_memory_meets_the_stated_peak(settled, noise, capped, half, height, width, latents, gb):
    vae, size = settled, (1, latents, height // 8, width // 8)
    if half == "decode":
        options = {"vram_gb": gb, "ram_gb": 62, "output": "uint8"}
        plan, source = vae.plan_decode(*size, **options), noise(1, 16, *size[1:]).half()
    else:
        options = {"vram_gb": gb}
        plan = vae.plan_encode(*size, **options)
        source = (noise(4 * latents - 3, height, width, 3) * 50 + 128).clamp(0, 255).byte()
    run = getattr(vae, half)
    result = run(source, **options)
    reserved, stats = torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()
    print(f"{half} {width}x{height} {gb} GB: {plan.describe()}; reserved {reserved / GIB:.2f} GB")
    assert stats["num_alloc_retries"] == stats["num_ooms"] == 0
    assert reserved <= gb * GIB
    assert abs(reserved - plan.peak_bytes) <= 0.05 * plan.peak_bytes
    if height < 2160:
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(result, run(source, **{**options, "vram_gb": 100}))


@pytest.mark.parametrize(("height", "width"), [(727, 1287), (1085, 1926)])
def test_pixels_that_fill_no_latent_are_stated(settled, noise, height, width):
    foreign = torch.cuda.memory_allocated() - settled.planner._weights
    size, rest = (1, 2, height // 8, width // 8), (height % 8, width % 8)
    plan = settled.plan_encode(*size, vram_gb=100, rest=rest)
    settled.encode((noise(5, height, width, 3) * 50 + 128).clamp(0, 255).byte(), vram_gb=100)
    allocated = torch.cuda.max_memory_allocated() - foreign
    print(f"encode {width}x{height}: {plan.describe()}; allocated {allocated / GIB:.2f} GB")
    assert allocated <= plan.peak_bytes


@pytest.mark.parametrize(("height", "width"), [(3072, 2048), (2304, 4096)])
def test_attention_takes_no_more_than_is_stated(settled, noise, height, width):
    """At these sizes a call once took 124 MiB more than the run's own memory."""
    foreign = torch.cuda.memory_allocated() - settled.planner._weights
    size = 1, 1, height // 8, width // 8
    plan = settled.plan_decode(*size, vram_gb=100, output="uint8")
    settled.decode(noise(1, 16, *size[1:]).half(), vram_gb=100, output="uint8")
    allocated = torch.cuda.max_memory_allocated() - foreign
    print(f"decode {width}x{height}: {plan.describe()}; allocated {allocated / GIB:.2f} GB")
    assert allocated <= plan.peak_bytes


def test_long_clips_need_no_more_host_memory_than_their_frames(settled, noise):
    """597 frames of 720p: the output and less than 2 GB besides; 157 with histories parked: what the plan says more."""
    for gb, latents in ((100, 150), (4, 40)):
        z = noise(1, 16, latents, 90, 160).half()
        plan = settled.plan_decode(1, latents, 90, 160, vram_gb=gb, output="uint8")
        settled.decode(z[:, :, :2], vram_gb=gb, output="uint8")
        POOL.release()
        before = resident()
        highest = []
        settled.decode(z, vram_gb=gb, output="uint8", progress=lambda *_: highest.append(resident()))  # noqa: B023
        frames = (4 * latents - 3) * 720 * 1280 * 3
        print(f"{gb} GB: {(max(highest) - before - frames - plan.host_bytes) / GIB:.2f} GB besides")
        assert max(highest) - before <= frames + plan.host_bytes + 2 * GIB


def resident():
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
