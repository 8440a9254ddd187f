"""Switches: what they accept, what they say of a machine, and that no combination changes the result."""

import itertools

import pytest
import torch
from zerowaste_vae.engine import InputError, load
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.options import BY_DEFAULT, DEFAULTS, OFF, TOGGLES, Options, unavailable, unused
from zerowaste_vae.engine.planning.fusable import availability

from .warm_kernels import SWITCHED

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
WARM = ("seedvr2-tiny switched",)
FUSED_ONLY = {"composed_upsample", "cuda_graphs", "async_offload", "winograd"}


def test_defaults_are_exact():
    off = {name for name in TOGGLES if getattr(DEFAULTS, name) is False}
    assert off == {"fp8", "tf32", "cudnn_benchmark"}
    assert DEFAULTS.min_db == 0


def test_switched():
    some = DEFAULTS.switched(on=["tf32"], off=["triton_fusion"])
    assert (some.tf32, some.triton_fusion) == (True, False)
    assert DEFAULTS.tf32 is False
    for on, off, says in ((["turbo"], [], "'turbo'"), (["fp8"], ["fp8"], "fp8"), ([], ["min_db"], "'min_db'")):
        with pytest.raises(InputError, match=says):
            DEFAULTS.switched(on, off)


@pytest.mark.parametrize(
    "bad", [{"fp8": "yes"}, {"tf32": 1}, {"triton_fusion": None}, {"min_db": -1.0}, {"min_db": "50"}, {"min_db": True}]
)
def test_bad_values(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        Options(**bad)


def test_availability_on_a_cpu():
    """Everything that needs a GPU has a reason."""
    reasons = availability("cpu", "seedvr2", None, torch.float32)
    assert set(reasons) == set(TOGGLES)
    assert {name for name, reason in reasons.items() if reason is None} == {"channels_last_3d", "flash_attention"}


@pytest.mark.parametrize(
    ("sm", "dtype", "missing"),
    [
        (120, torch.float16, {"tf32"}),
        (120, torch.float32, set()),
        (86, torch.float16, {"tf32", "fp8"}),
        (75, torch.float32, {"tf32", "fp8"}),
    ],
)
def test_availability_on_gpus(monkeypatch, sm, dtype, missing):
    monkeypatch.setattr("zerowaste_vae.engine.options.target", lambda *_: capabilities("card", sm, (3, 6)))
    reasons = unavailable(CUDA, dtype, None)
    assert {name for name, reason in reasons.items() if reason} == missing
    off = unavailable(CUDA, dtype, "no Triton")
    assert {name for name, reason in off.items() if reason == "no Triton"} == FUSED_ONLY - {"async_offload"} | {
        "triton_fusion", "fp8",
    }  # fmt: skip


def test_what_a_run_does_not_use(monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.options.target", lambda *_: capabilities("card", 90, (3, 6)))
    reasons = unavailable(CUDA, torch.float16, None)
    everything = DEFAULTS.switched(on=TOGGLES)
    fused = unused(everything, reasons, torch.float16, fused=True)
    assert set(fused) == {"tf32", "cudnn_benchmark"}
    tiles = unused(everything, reasons, torch.float16, fused=False)
    assert set(tiles) == {"tf32", "triton_fusion", *FUSED_ONLY}
    plain = unused(DEFAULTS.switched(off=TOGGLES), reasons, torch.float16, fused=False)
    assert plain == {name: toggle.off(name) for name, toggle in TOGGLES.items()}
    assert plain["cuda_graphs"] == OFF and plain["winograd"] == OFF
    for fused, dtype in itertools.product((True, False), (torch.float16, torch.float32)):
        untouched = unused(DEFAULTS, unavailable(CUDA, dtype, None), dtype, fused=fused)
        assert untouched["tf32"].startswith(BY_DEFAULT), untouched
        assert not [name for name, reason in untouched.items() if OFF in reason], "nobody has switched it"
    layout = unused(DEFAULTS.switched(off=["channels_last_3d"]), reasons, torch.float16, fused=False)
    assert "channels_last_3d" in layout["triton_fusion"]
    fp32 = unused(everything, unavailable(CUDA, torch.float32, "fp32"), torch.float32, fused=False)
    assert "tf32" not in fp32 and "cudnn_benchmark" not in fp32
    exact = unused(DEFAULTS.switched(on=["cudnn_benchmark"]), reasons, torch.float32, fused=False)
    assert "without cuDNN" in exact["cudnn_benchmark"]


# -- passes on a VAE ------------------------------------------------------------------------------------------------


@pytest.fixture
def fused_vae(vae_file, monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    return load(vae_file, device="cpu")


@pytest.mark.parametrize("off", [[name] for name in TOGGLES] + [list(TOGGLES)], ids="-".join)
def test_each_switch_off_keeps_the_result(vae, fused_vae, noise, atol, off):
    z, video = noise(1, 16, 3, 3, 5), torch.rand(5, 24, 17, 3)
    fused_vae.options = DEFAULTS.switched(off=off)
    torch.testing.assert_close(fused_vae.decode(z, chunk=2), vae.decode(z), rtol=0, atol=atol)
    plan = fused_vae.last_report.mode
    assert ("plain torch" in plan) == bool({"triton_fusion", "channels_last_3d"} & set(off))
    assert {name for name, reason in fused_vae.last_report.off if reason.startswith((OFF, BY_DEFAULT))} >= set(off)
    torch.testing.assert_close(fused_vae.encode(video), vae.encode(video), rtol=0, atol=1e-4)


def test_pairs_of_switches_keep_the_result(vae, fused_vae, noise, atol):
    """Those that change what runs, two at a time."""
    z = noise(1, 16, 2, 2, 3)
    expected = vae.decode(z)
    passes = ("channels_last_3d", "triton_fusion", "composed_upsample", "flash_attention")
    for pair in itertools.combinations(passes, 2):
        fused_vae.options = DEFAULTS.switched(off=pair)
        torch.testing.assert_close(fused_vae.decode(z), expected, rtol=0, atol=atol)


def test_options_are_a_vaes_own(vae_file, noise):
    a = load(vae_file, device="cpu")
    b = a.with_options(DEFAULTS.switched(off=["flash_attention"]))
    z = noise(1, 16, 1, 2, 2)
    b.decode(z)
    assert a.last_report is None and a.options == DEFAULTS
    assert b.model is a.model
    a.triton_fusion = False
    assert (a.triton_fusion, b.triton_fusion) == (False, True)
    assert a.options == DEFAULTS.switched(off=["triton_fusion"])


def test_channels_last_is_real_and_undone(vae, vae_file, noise, atol):
    other = load(vae_file, device="cpu")
    seen = []
    conv = other.model.decoder.up_blocks[2].resnets[1].conv1
    last, real = torch.channels_last_3d, conv._conv_forward

    def convolve(x, weight, bias):
        seen.append(x.is_contiguous(memory_format=last) and weight.is_contiguous(memory_format=last))
        return real(x, weight, bias)

    conv._conv_forward = convolve
    z = noise(1, 16, 2, 4, 4)
    other.options = DEFAULTS.switched(on=["channels_last_3d"])
    torch.testing.assert_close(other.decode(z), vae.decode(z), rtol=0, atol=atol)
    assert seen and all(seen)
    assert "NDHWC" in other.last_report.mode
    seen.clear()
    other.options = DEFAULTS
    assert torch.equal(other.decode(z), vae.decode(z))
    assert seen and not any(seen)
    assert "NCDHW" in other.last_report.mode


def test_plans_count_what_the_switches_take(fused_vae):
    size = (4, 48, 64)
    exact = fused_vae.plan_decode(*size)
    fused_vae.options = DEFAULTS.switched(off=["composed_upsample"])
    assert fused_vae.plan_decode(*size).peak_bytes > exact.peak_bytes
    fused_vae.options = DEFAULTS.switched(off=["flash_attention"])
    scores = 512 * 48 * 64 * 4  # of one block of queries
    assert fused_vae.plan_decode(*size).peak_bytes >= exact.peak_bytes + scores
    fused_vae.options = DEFAULTS.switched(off=["triton_fusion"])
    plain = fused_vae.plan_encode(1, 48, 64)
    fused_vae.options = DEFAULTS.switched(off=["triton_fusion", "flash_attention"])
    assert fused_vae.plan_encode(1, 48, 64).peak_bytes >= plain.peak_bytes


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_file(make_vae_file):
    """Widths that the fused kernels take."""
    return make_vae_file((16, 32, 64, 64), (16, 32, 64, 64), 8)


def decibel(actual, expected):
    """PSNR with peak 2.0 of frames in 0..1."""
    return (1.0 / (actual - expected).square().mean()).log10().item() * 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_each_switch_on_a_gpu(gpu_file, noise):
    """fp16: what only moves data changes no bit; other arithmetic is no worse than plain torch. Nothing stays set."""
    z = noise(1, 16, 3, 10, 13)
    exact = load(gpu_file, "fp32", "cpu").decode(z)
    vae = load(gpu_file, "fp16", "cuda")
    default = vae.decode(z)
    assert torch.equal(vae.decode(z.cuda()), default)
    vae.options = DEFAULTS.switched(off=["triton_fusion"])
    plain = decibel(vae.decode(z), exact)
    benchmark, flash = torch.backends.cudnn.benchmark, torch.backends.cuda.flash_sdp_enabled()
    for off in SWITCHED:
        vae.options = DEFAULTS.switched(off=off)
        out = vae.decode(z)
        print(f"{', '.join(off)} off: {decibel(out, exact):.1f} dB, plain torch {plain:.1f}")
        assert decibel(out, exact) >= plain - 0.5
        if off[0] in ("async_offload", "cuda_graphs", "fp8", "tf32", "cudnn_benchmark") and len(off) == 1:
            assert torch.equal(out, default)
    vae.options = DEFAULTS.switched(on=["channels_last_3d", "cudnn_benchmark"], off=["triton_fusion"])
    assert decibel(vae.decode(z), exact) >= plain - 0.5
    assert "NDHWC" in vae.last_report.mode
    assert (torch.backends.cudnn.benchmark, torch.backends.cuda.flash_sdp_enabled()) == (benchmark, flash)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_tf32_rounds_only_where_asked(gpu_file, noise, atol):
    """TF32 on a GPU rounds fp32 runs that ask for it, and no others."""
    z = noise(1, 16, 2, 6, 7)
    expected = load(gpu_file, "fp32", "cpu").decode(z)
    vae = load(gpu_file, "fp32", "cuda")
    torch.testing.assert_close(vae.decode(z), expected, rtol=0, atol=atol)
    fast = vae.with_options(DEFAULTS.switched(on=["tf32"]))
    rounded = fast.decode(z)
    assert not torch.allclose(rounded, expected, rtol=0, atol=atol) and decibel(rounded, expected) > 40
    torch.testing.assert_close(vae.decode(z), expected, rtol=0, atol=atol)
