"""Out of memory on a real GPU: the frames keep every bit, whatever the decode had to give up on the way."""

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.runtime.context import ExecutionContext
from zerowaste_vae.engine.runtime.pinned import POOL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("seedvr2",)
GIB = 1 << 30
#: 512 x 384 pixels, 21 frames.
SIZE = (1, 16, 6, 48, 64)


@pytest.fixture(scope="module")
def vae(full_width):
    return load(full_width, precision="fp16", device="cuda")


@pytest.fixture
def capped(vae):
    """capped(bytes): what this process may reserve, until the test ends (gpu_as_found in tests/conftest.py)."""
    vae.release()

    def cap(size):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])

    return cap


def events(vae):
    return {name: count for name, count in vae.last_report.events.items() if count}


def take_everything():
    """Blocks that leave no memory under the cap."""
    torch.cuda.empty_cache()
    blocks, size = [], 64 << 30
    while size >= 512:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return blocks


def test_a_plan_that_does_not_fit_after_all(vae, noise, capped):
    z = noise(*SIZE)
    video = noise(21, 384, 512, 3).sigmoid()
    for plan, run in (
        (vae.plan_decode, lambda: vae.decode(z, output="float16")),
        (vae.plan_encode, lambda: vae.encode(video)),
    ):
        expected = run()
        vae.release()
        allocated = torch.cuda.memory_allocated()
        capped(int(0.8 * plan(*SIZE[2:]).peak_bytes))
        assert torch.equal(run(), expected)
        print(events(vae), vae.last_report.plan)
        assert vae.last_report.events["oom_step_downs"] >= 1
        assert not vae.last_report.events["replayed_chunks"]
        vae.release()
        assert torch.cuda.memory_allocated() == allocated
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("given_back", [True, False])
def test_memory_that_others_take_during_a_run(vae, noise, capped, monkeypatch, given_back):
    """Given back when asked, the decode goes on as it was; else, and where its reserve is gone too, it moves, between
    two chunks, into what is left."""
    z, hog = noise(*SIZE), []
    expected = vae.decode(z, output="float16", chunk=1)
    capped(vae.plan_decode(*SIZE[2:], output="float16", chunk=1).peak_bytes + (512 << 20))

    def others(done, total):
        if done == 3:
            hog.extend(take_everything())

    def recover(run):
        if run.pressed:
            hog.extend(take_everything())
        return recovers(run)

    recovers = ExecutionContext.recover
    if not given_back:
        monkeypatch.setattr(ExecutionContext, "recover", recover)
    vae.on_pressure = hog.clear if given_back else None
    try:
        out = vae.decode(z, output="float16", chunk=1, progress=others)
    finally:
        vae.on_pressure = None
        hog.clear()
    print(events(vae), vae.last_report.plan)
    assert torch.equal(out, expected)
    assert vae.last_report.events["oom_retries"] >= 1
    assert vae.last_report.events["oom_step_downs"] == (0 if given_back else 1)
    assert not vae.last_report.events["replayed_chunks"]


def test_parked_histories_are_handed_over(vae, noise, capped):
    z, hog = noise(*SIZE), []
    expected = vae.decode(z, output="float16")
    tight = {"output": "float16", "vram_gb": 1.8}
    plan = vae.plan_decode(*SIZE[2:], **tight)
    assert plan.parking is not None
    capped(plan.peak_bytes + (512 << 20))
    out = vae.decode(z, **tight, progress=lambda *_: hog or hog.extend(take_everything()))
    hog.clear()
    print(events(vae), vae.last_report.plan)
    assert torch.equal(out, expected)
    assert vae.last_report.events["oom_retries"] >= 1
    assert sum(b.numel() for b in POOL._idle) == POOL.nbytes


def test_overflow_goes_on_in_bf16(vae, noise):
    z = noise(*SIZE)
    weight = vae.model.decoder.up_blocks[3].resnets[1].conv2.weight
    kept = weight.clone()
    vae.release()
    weight.mul_(1e5)
    try:
        out = vae.decode(z)
    finally:
        weight.copy_(kept)
        vae.release()
    # Frames are looked at when they have reached the host: the next chunk is under way then.
    assert vae.last_report.events["nan_reruns"] == 1 and vae.last_report.events["replayed_chunks"] <= 1
    assert torch.isfinite(out).all()
    assert vae.last_report.mode.startswith("fused")
