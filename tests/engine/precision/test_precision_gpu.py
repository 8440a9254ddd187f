"""8 bit on a real GPU: the emulated numbers, every chunking the same bits, memory as stated from the first call on."""

import math
import os

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.precision.policy import Policy, eligible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("seedvr2", "seedvr2-8-bit")
GIB = 1 << 30
KINDS = ["fp8", "int8"]


def decibel(a, b):
    return 10 * math.log10(1 / (a - b).double().square().mean().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif("ZEROWASTE_INNER" in os.environ, reason="this is the process that it runs")
def test_emulation(own_process, kind):
    """Kernels compute what a CPU emulates."""
    inner = own_process()
    print(inner.stdout[-3000:], inner.stderr[-2000:])
    assert inner.returncode == 0 and "1 passed" in inner.stdout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif("ZEROWASTE_INNER" not in os.environ, reason="only in the process that the test above runs")
def test_emulation_inside(wide_file, noise, monkeypatch, kind):
    """One convolution in 8 bit at a time: behind several, one value rounded the other way moves all that follow."""
    z = noise(1, 16, 3, 6, 7)
    exact = load(wide_file, precision="fp32", device="cpu").decode(z)
    emulated, vae = (load(wide_file, precision=kind, device=where) for where in ("cpu", "cuda"))
    emulated.decode(z)  # the ranges found here serve both
    ranges = emulated.store.table("decoder").ranges
    for key in eligible(vae.model.decoder)[::6]:
        for each in (emulated, vae):
            policy = Policy({key: kind}, ranges)
            monkeypatch.setattr(each._mixed, "settle", lambda *_, policy=policy: policy)
        frames, ours = emulated.decode(z), vae.decode(z)
        for each in (emulated, vae):
            assert each.planner.walk.operands("decoder").policy.kinds == {key: kind}
        cost, apart = decibel(frames, exact), decibel(ours, frames)
        print(f"{kind} {key}: {cost:.1f} dB against fp32, GPU against CPU {apart:.1f} dB")
        assert apart > cost + 6


@pytest.mark.parametrize("kind", KINDS)
def test_equal_bits(full_width, noise, kind):
    """Every chunking and parking gives the same bits."""
    z, video = noise(1, 16, 4, 18, 23), noise(13, 144, 176, 3).clamp(-1, 1) * 0.5 + 0.5
    vae = load(full_width, precision=kind, device="cuda")
    frames, latent = vae.decode(z), vae.encode(video)
    for chunk in (1, 2, 3):
        assert torch.equal(vae.decode(z, chunk=chunk), frames)
    peak = vae.plan_decode(4, 18, 23).peak_bytes / GIB
    targets = ({"vram_gb": share / 20 * peak, "ram_gb": 8} for share in range(19, 0, -1))
    parked = next(target for target in targets if vae.plan_decode(4, 18, 23, **target).parking)
    assert torch.equal(vae.decode(z, **parked), frames)
    assert torch.equal(vae.encode(video), latent)
    again = load(full_width, precision=kind, device="cuda")  # from the prepared weights
    assert torch.equal(again.decode(z), frames)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("half", "gb"), [("decode", None), ("decode", 4.0), ("encode", None)])
def test_stated_memory(full_width, noise, kind, half, gb):
    """A file that nobody has calibrated yet, at 1280x720; what was reserved includes the measuring and the packing."""
    vae = load(full_width, precision=kind, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    options = {"vram_gb": gb, "ram_gb": 8} if half == "decode" else {"vram_gb": gb}
    if half == "decode":
        vae.decode(noise(1, 16, 2, 90, 160), output="uint8", **options)
    else:
        vae.encode(noise(5, 720, 1280, 3).clamp(-1, 1) * 0.5 + 0.5, **options)
    stated, reserved = vae.last_report.predicted_gb, torch.cuda.max_memory_reserved() / GIB
    print(f"{half} {kind} {gb} GB: stated {stated:.2f} GB, reserved {reserved:.2f} GB")
    assert 0.95 * stated < reserved < 1.05 * stated
