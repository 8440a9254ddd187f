"""Mage-VAE at its published widths on a real GPU: kernels beside their references, bits in every batch, band and tile,
memory within plans, rounding beside plain torch."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.families.mage.kernels.mixing import blocks, gates, layer_normed, mixed, unwindowed, windowed
from zerowaste_vae.engine.families.mage.kernels.patch_pixels import patch_pixels
from zerowaste_vae.engine.kernels.to_pixels import RAW
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.runtime.parking import Parking
from zerowaste_vae.engine.system.memory import GIB

from ..gpu_models import decibels, make, plain_torch, reserved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("mage",)
#: Where kernels run beside their references: tools/build_kernels.py --tests launches them on "meta".
DEVICE = "cuda"
#: The largest difference, in 16 bit.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
PLACEMENTS = [
    (Steps(1, 0), None), (Steps(3, 0), None), (Steps(1, 0), Parking(None, 0)), (Steps(2, 0), Parking(None, 64 << 20)),
]  # fmt: skip


@pytest.fixture(scope="module", params=["bf16", "fp16", "fp8", "int8"])
def vae(request):
    made = make("mage", request.param)
    if made.precision != request.param:
        pytest.skip(f"{request.param} does not run on {torch.cuda.get_device_name()}")
    return made


def test_every_batch_and_band_has_the_same_bits(vae, noise, monkeypatch):
    z = noise(3, 128, 1, 37, 21)
    pictures = (noise(3, 37 * 16 + 5, 21 * 16 + 3, 3) * 50 + 128).clamp(0, 255).byte()
    frames, latent = vae.decode(z), vae.encode(pictures)
    assert vae.last_report.mode.startswith("fused") and frames.std() > 0.05 and latent.isfinite().all()
    plain = vae.planner.plan
    for steps, parking in PLACEMENTS:
        other = {"steps": steps, "parking": parking}
        monkeypatch.setattr(vae.planner, "plan", lambda *a, o=other, **k: replace(plain(*a, **k), **o))
        assert torch.equal(vae.decode(z), frames), other
        assert torch.equal(vae.encode(pictures), latent), other
    monkeypatch.undo()
    if vae.precision not in ("bf16", "fp16"):  # ranges of 8 bit are a batch's own where a file is not calibrated
        return
    assert torch.equal(vae.decode(z[1:2]), frames[1:2])
    assert torch.equal(vae.encode(pictures[1:2]), latent[1:2])
    tiled = vae.decode(z, tiling="blended", tile=256, overlap=64)
    torch.testing.assert_close(tiled, frames, rtol=0, atol=2e-3)  # they only round, to 16 bit, where they overlap


def test_rounding_is_no_worse_than_plain_torchs(vae, noise):
    if vae.precision not in ("bf16", "fp16"):
        pytest.skip("8 bit has its own floor")
    z = noise(1, 128, 1, 40, 48)
    exact = make("mage", "fp32").decode(z)
    fused = decibels(vae.decode(z), exact)
    with plain_torch(vae):
        plain = decibels(vae.decode(z), exact)
    print(f"fused {fused:.2f} dB, plain torch {plain:.2f} dB")
    assert fused > plain - 0.5


def test_memory(noise):
    vae = make("mage", "bf16")
    z, x = noise(1, 128, 1, 128, 128), (noise(1, 2048, 2048, 3) * 50 + 128).clamp(0, 255).byte()
    for work, source in ((vae.decode, z), (vae.encode, x)):
        work(source)
        others = reserved() - vae._fused.packed_bytes("decoder") - vae._fused.packed_bytes("encoder")
        work(source)
        stated, most = vae.last_report.predicted_gb, (torch.cuda.max_memory_reserved() - others) / GIB
        print(f"{vae.last_report.operation}: stated {stated:.3f} GB, reserved {most:.3f} GB")
        assert most <= 1.05 * stated + 0.11  # the other half's packed weights stay


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_kernels_agree_with_their_references(dtype):
    """Beside sums in another order, of products of rounded values."""
    torch.manual_seed(0)

    def draw(*shape, kind=dtype):
        return torch.randn(*shape, device=DEVICE).to(kind)

    wide, bound = torch.float32, BOUNDS[dtype]
    x, more, (weight, bias, later) = draw(70, 768)[:, 384:], draw(70, 384), draw(3, 384, kind=wide)
    picture, taps, totals = draw(19, 45, 384), draw(9, 384, kind=wide) / 3, 19 * 45 * draw(384, kind=wide)
    matrices, spread = (draw(384, 384, kind=wide) / 20, draw(384, 384, kind=wide)), draw(45, 70, 384)
    moved, rounded, sums = [], [], []
    for backend in ("triton", "reference"):
        stream, normed, result = x.clone(), x.new_empty(70, 384), torch.empty_like(picture)
        layer_normed(stream, weight, bias, 1e-6, normed, more=(more, later), backend=backend)
        parts, scaled = bias.new_empty(blocks(19 * 45), 384), x.new_empty(384, 384)
        mixed(picture, taps, bias, result, parts, backend=backend)
        gates(totals, 19 * 45, matrices[0], bias, matrices[1], scaled, backend=backend)
        flat, joined = x.new_empty(6 * 1024, 384), spread.clone()
        windowed(spread, 32, flat, backend=backend)
        unwindowed(flat, 32, joined, backend=backend)
        moved.append((stream, flat, joined))
        rounded.append((normed, result, scaled))
        sums.append(parts)
    assert all(map(torch.equal, *moved))
    torch.testing.assert_close(*rounded, rtol=bound, atol=bound)
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-3)


@pytest.fixture(params=BOUNDS, ids=str)
def end(request):
    """The packed network that makes pixels of positions."""
    vae = make("mage", {torch.bfloat16: "bf16", torch.float16: "fp16"}[request.param])
    vae.decode(torch.zeros(1, 128, 1, 2, 2))
    return vae._fused.decoder().stages[-1][-1].packed


def test_pixels(end):
    """Beside their reference."""
    torch.manual_seed(0)
    features = torch.randn(1, 9, 11, 768, device=DEVICE).to(end.dtype)
    outs = [torch.empty(1, 144, 176, 3, device=DEVICE) for _ in range(2)]
    patch_pixels(features, end, 1e-6, outs[0], pixels=RAW, backend="triton")
    patch_pixels.reference(features, end, 1e-6, outs[1], pixels=RAW)
    assert (outs[0] - outs[1]).std() < BOUNDS[end.dtype] * outs[1].std()
