"""MiniMax H3's VAE on a real GPU, four layers of the published width: bits in every batch, placement and step, memory
within plans, and rounding beside fp32."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from zerowaste_vae.engine.extras.graphs import graphs
from zerowaste_vae.engine.families.minimax_h3.running import transformer
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.system.memory import GIB

from .. import gpu_models
from ..gpu_models import decibels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("minimaxh3",)
#: Two tiles wide, two high, three sections of which the last is filled up.
SIZE = (13, 20, 24)


@pytest.fixture(scope="module")
def make():
    return partial(gpu_models.make, "minimaxh3")


@pytest.fixture(scope="module")
def z():
    return torch.randn(1, 24, *SIZE, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["fp16", "bf16", pytest.param("fp32", marks=pytest.mark.plain), "fp8", "int8"])
def vae(request, make):
    vae = make(request.param)
    if vae.precision != request.param:
        pytest.skip(vae.unused().get(request.param, "not here"))
    return vae


def test_equal_bits(vae, z, monkeypatch):
    """Tiles at a time, and layers on the device or streamed."""
    frames, plain = vae.decode(z), vae.planner.plan
    assert frames.isfinite().all() and frames.std() > 0.02
    for tiles, resident in ((1, 4), (64, 4), (1, 0), (1, 0), (5, 2)):

        def plan(*a, tiles=tiles, resident=resident, **k):
            made = plain(*a, **k)
            return replace(made, own=replace(made.own, tiles=tiles, resident=resident))

        monkeypatch.setattr(vae.planner, "plan", plan)
        assert torch.equal(vae.decode(z), frames), (tiles, resident)
    assert torch.equal(vae.decode(z, start=20, frames=15), frames[:, 20:35])
    assert torch.equal(torch.cat(list(vae.stream(z)), 1), frames)


def test_one_picture(vae):
    """One picture is the same alone and among others."""
    for size in ((6, 7), (20, 24)):
        z = torch.randn(5, 24, 1, *size, generator=torch.Generator().manual_seed(2))
        together = vae.decode(z)
        assert torch.equal(vae.decode(z[2:3]), together[2:3])


def test_replayed_layers_have_the_same_bits(vae, monkeypatch):
    """Recorded whenever a batch comes again, whatever the host's speed; within plans too."""
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    plain = vae.with_options(DEFAULTS.switched(off=["cuda_graphs"]))
    for size in ((1, 6, 7), (7, 20, 24)):
        clips = [torch.randn(1, 24, *size, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5)]
        expected = [plain.decode(z) for z in clips]
        plain.release()
        peak = vae.plan_decode(*size).peak_bytes
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            for z, frames in zip(clips, expected, strict=True):
                assert torch.equal(vae.decode(z), frames), size
            assert torch.cuda.max_memory_allocated() <= peak
        replayed, batches = vae._family["decoder"].runs.replayed
        assert replayed == batches > 0 and "CUDA graphs" in vae.last_report.mode
    vae.release()
    assert KEPT.nbytes(torch.device("cuda", torch.cuda.current_device())) == 0


@pytest.mark.parametrize("share", [1.0, 0.94])
def test_decodes_stay_within_plans(vae, z, share):
    """With all weights on the device, and with some streamed."""
    vae.release()
    gb = share * vae.plan_decode(*SIZE).peak_bytes / GIB + 0.001
    plan = vae.plan_decode(*SIZE, vram_gb=gb)
    assert (plan.own.resident < 4) == (share < 1) and plan.peak_bytes <= gb * GIB
    torch.cuda.reset_peak_memory_stats()
    vae.decode(z, vram_gb=gb)
    assert torch.cuda.max_memory_allocated() <= plan.peak_bytes


def test_room_for_encode(make, z):
    """An encode makes room where the decoders weights are."""
    vae = make("fp16")
    frames = vae.decode(z[:, :, :2])
    assert vae.packed_bytes
    gb = vae.plan_encode(2, *SIZE[1:]).peak_bytes / GIB - 0.05 * vae.packed_bytes / GIB
    assert vae.encode(frames, vram_gb=gb).isfinite().all()


@pytest.mark.parametrize("precision, least", [("fp16", 50), ("bf16", 35), ("fp8", 25), ("int8", 30)])
def test_rounding(make, z, precision, least):
    exact = make("fp32").decode(z[:, :, :2])
    vae = make(precision)
    if vae.precision != precision:
        pytest.skip(vae.unused().get(precision, "not here"))
    assert decibels(vae.decode(z[:, :, :2]), exact) > least


@pytest.mark.parametrize("precision, place, value", [
    ("fp16", "gated", math.nan), ("fp8", "gated", math.nan), ("fp8", "normalised", math.nan),
    ("int8", "rounded", math.nan), ("int8", "rounded", math.inf), ("int8", "normalised", math.nan),
])  # fmt: skip
def test_what_is_not_finite_is_made_again(make, z, monkeypatch, precision, place, value):
    """One number of one row in front of a pass that rounds to 8 bit."""
    vae = make(precision)
    if vae.precision != precision:
        pytest.skip(vae.unused().get(precision, "not here"))
    vae.options = vae.options.switched(off=["cuda_graphs"])  # a replay would pass by the fault
    safer, plain, struck = vae._safer("").decode(z[:, :, :2]), getattr(transformer, place), []

    def strike(x, *rest, **options):
        if not struck and not options.get("zeroed"):
            x[7, 40] = value
            struck.append(x.dtype)
        plain(x, *rest, **options)

    monkeypatch.setattr(transformer, place, strike)
    frames = vae.decode(z[:, :, :2])
    assert struck and vae.last_report.events["nan_reruns"] == 1
    assert torch.equal(frames, safer)


def test_kernels_agree_with_torch(make, z):
    vae = make("fp16")
    with_kernels = vae.decode(z[:, :, :2])
    vae.options = vae.options.switched(off=["triton_fusion"])
    assert decibels(vae.decode(z[:, :, :2]), with_kernels) > 50


def test_encodes_have_the_same_bits_in_every_step(make, monkeypatch):
    others = torch.cuda.memory_allocated()  # a fixture's VAE may live
    vae = make("fp16")
    video = torch.rand(1, 22, 288, 272, 3, generator=torch.Generator().manual_seed(3))
    whole, plain = vae.encode(video), vae.planner.plan
    assert vae.last_report.mode.startswith("fused") and whole.isfinite().all()
    for frames in (8, 4, 1):
        monkeypatch.setattr(vae.planner, "plan", lambda *a, n=frames, **k: replace(
            plain(*a, **k), steps=replace(plain(*a, **k).steps, frames=n)))  # fmt: skip
        assert torch.equal(vae.encode(video), whole), frames
    monkeypatch.undo()
    torch.cuda.reset_peak_memory_stats()
    plan = vae.plan_encode(7, 18, 17)
    vae.encode(video)
    assert torch.cuda.max_memory_allocated() - others <= plan.peak_bytes
    exact = make("fp32").encode(video)
    error = (whole - exact).square().mean() / exact.square().mean()
    assert 10 * math.log10(1 / error) > 40


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_equal_bits_encode(make, monkeypatch, precision):
    """Encodes in 8 bit have the same bits in every step."""
    vae = make(precision)
    if vae.precision != precision:
        pytest.skip(vae.unused().get(precision, "not here"))
    video = torch.rand(1, 22, 288, 272, 3, generator=torch.Generator().manual_seed(3))
    whole, plain = vae.encode(video), vae.planner.plan
    assert f"convolutions in {precision}" in vae.last_report.operands and whole.isfinite().all()
    for frames in (8, 1):
        monkeypatch.setattr(vae.planner, "plan", lambda *a, n=frames, **k: replace(
            plain(*a, **k), steps=replace(plain(*a, **k).steps, frames=n)))  # fmt: skip
        assert torch.equal(vae.encode(video), whole), frames
    exact = make("fp32").encode(video)
    error = (whole - exact).square().mean() / exact.square().mean()
    assert 10 * math.log10(1 / error) > 15
