"""LTX-2.5's diffusion decoder on a real GPU in several passes of a clip, in parts of it, and its noise."""

import gc
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.families.ltx_diffusion.running.noise import PART, FrameNoise
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.system.memory import GIB

from ..gpu_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.fixture(scope="module")
def vae():
    return make("ltx-diffusion", "bf16")


def latents(*shape):
    return torch.randn(1, 128, *shape, generator=torch.Generator().manual_seed(1))


def taken(call):
    """The result of a call, and the bytes that torch reserves for it in addition to what it had."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    made = call()
    torch.cuda.synchronize()
    return made, torch.cuda.max_memory_reserved() - before


def test_passes(vae):
    """Whole frames within less and less memory, with the bits of one pass; each plan keeps to what it states."""
    size = 24, 8, 12
    z = latents(*size)
    whole, plan = vae.decode(z), vae._plan("decoder", size, Request())
    assert plan.steps.passes == 1 and whole.isfinite().all()
    own = sum(p.nbytes for p in vae.model.parameters())
    seen = []
    while plan.steps.passes < 9:
        plan = vae._plan("decoder", size, Request(), below=plan.peak_bytes * 31 // 32)  # states all that it may take
        if plan.steps.passes in {1, *seen} and not plan.tiled:
            continue
        plans = []
        made, more = taken(lambda plan=plan, plans=plans: vae.decode(z, plan=plan, on_plan=plans.append))
        assert torch.equal(made, whole)
        assert plans == [plan] and more + own <= plan.peak_bytes
        seen.append(plan.steps.passes)
    assert seen == [3, 5, 9]  # two passes would take no less than one


def test_under_8_gb(vae):
    """Whole frames of 1280x704 within 8 GB, as long as a few passes' rings; the bits of one pass."""
    size = 7, 22, 40
    z, plans = latents(*size), []
    whole = vae.decode(z, output="uint8")
    made, more = taken(lambda: vae.decode(z, output="uint8", vram_gb=8, on_plan=plans.append))
    assert [p.steps.passes for p in plans] == [3] and not plans[0].tiled and plans[0].peak_bytes < 8 * GIB
    assert torch.equal(made, whole)
    assert more + sum(p.nbytes for p in vae.model.parameters()) <= plans[0].peak_bytes


def test_parts(vae):
    """A part begins late, with the bits and the noise of the whole clip, also in passes."""
    z = latents(34, 3, 4)
    whole = vae.decode(z)
    first, last = vae.model.decoder.program.window(240, 249, 34)
    assert first > 0
    assert torch.equal(vae.decode(z, start=240, frames=9), whole[:, 240:249])
    plan = vae._plan("decoder", (last - first, 3, 4), Request())
    plan = replace(plan, steps=Steps(last - first, 8, pieces=True, passes=3))
    assert torch.equal(vae.decode(z, start=240, frames=9, plan=plan), whole[:, 240:249])


def test_noise(vae):
    """It is that of one draw on the GPU, which takes its memory once."""
    frames, device = 2 * PART + 3, torch.device("cuda")
    made, more = taken(lambda: FrameNoise(None, frames, 704, 1280, torch.bfloat16, device))
    generator = torch.Generator(device).manual_seed(0)
    whole = torch.randn(1, 3, frames, 704, 1280, generator=generator, device=device, dtype=torch.bfloat16)
    assert torch.equal(torch.stack([made(i) for i in range(frames)], 1), whole[0])
    assert more < 1.6 * whole.nbytes  # a part of it is laid out anew


def test_noise_on_its_way(vae, monkeypatch):
    """The host does not wait for noise for which there is room; it is complete, and its GPU memory free, when the first
    frame is asked for. Frames are those of noise that was waited for."""
    frames, device, begun = 2 * PART + 3, torch.device("cuda"), []
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    waited = FrameNoise(None, frames, 704, 1280, torch.bfloat16, device)
    made = FrameNoise(None, frames, 704, 1280, torch.bfloat16, device, room=1 << 30)
    assert made.copying and not waited.copying
    assert not FrameNoise(None, frames, 704, 1280, torch.bfloat16, device, room=frames * 3 * 704 * 1280 * 2).copying
    first = made(0)
    assert not made.copying and torch.cuda.memory_reserved() - before < 32 << 20
    assert torch.equal(first, waited(0)) and all(torch.equal(made(i), waited(i)) for i in range(frames))
    z, settle = latents(5, 4, 6), FrameNoise.settle
    monkeypatch.setattr(FrameNoise, "settle", lambda self: begun.append(self.copying) or settle(self))
    whole = vae.decode(z)
    assert begun[0] and not any(begun[1:])
    vae.options = vae.options.switched(off=["async_offload"])
    begun.clear()
    assert torch.equal(vae.decode(z), whole) and not any(begun)
    vae.options = vae.options.switched(on=["async_offload"])
