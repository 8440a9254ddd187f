"""A card's ratio on the GPU at hand: who may stand for whom, what is loaded inside, and that nothing of it stays."""

import types
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.bench import ratio
from zerowaste_vae.engine.extras.bench.form import padded
from zerowaste_vae.engine.extras.bench.ratio import run, unit
from zerowaste_vae.engine.extras.bench.ratio.assemble import products
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.kernels import launching, targets
from zerowaste_vae.engine.kernels.gpus import RATES, find
from zerowaste_vae.engine.kernels.prebuilt import launch
from zerowaste_vae.engine.kernels.prebuilt.library import Entry
from zerowaste_vae.engine.kernels.targets import prebuilt, target

CUDA = torch.device("cuda", 0)
TEXT = unit.text("f32")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """An H200, as far as anything here asks, whose driver and sets write down what is asked of them."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(targets, "_not_there", lambda form: None)
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path))

    class Driver:
        def __init__(self):
            self.loaded = []

        def load(self, device, code, symbol, shared):
            self.loaded.append((code, shared))
            return 7

    class Sets:
        def entry(self, form, key):
            return Entry("products", 40 << 10, 8, (), ())

        def texts(self, form, use):
            return ["a text"]

    found = types.SimpleNamespace(driver=Driver(), sets=Sets())
    monkeypatch.setattr(run, "driver", lambda: found.driver)
    monkeypatch.setattr(run, "library", lambda: found.sets)
    monkeypatch.setattr(run, "measure", lambda device, folder: unit.Unit({"f32": 1359.0, "f16": 1362.0, "s32": 2720.0},
                                                                         1776.0))  # fmt: skip
    return found


@pytest.mark.parametrize(("name", "form", "words"), [
    ("RTX 4090 Laptop GPU", None, "makers set a laptop GPU's clock"), ("sm_89", None, "is a generation: name a card"),
    ("H200", None, "runs code of its own"), ("A100 80 GB", None, "runs code of its own"),
    ("RTX 5070 Ti", "sm_89", "of the generation sm_120, so --as sm_89 does not go with it"),
])  # fmt: skip
def test_cards_that_have_no_ratio(gpu, name, form, words):
    with pytest.raises(InputError, match=f"--ratio '{name}'.*{words}"):
        ratio.ratio_of(name, form, CUDA)


def test_gpus_that_stand_for_no_card(gpu, monkeypatch):
    with pytest.raises(InputError, match="needs an H100 or H200, not cpu"):
        ratio.ratio_of("RTX 3060", None, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    with pytest.raises(InputError, match="needs an H100 or H200, whose processors make more products"):
        ratio.ratio_of("RTX 3060", None, CUDA)


def test_fp8_is_refused():
    ratio.refuse_fp8(["fp16", "int8"], "--ratio")
    with pytest.raises(InputError, match=r"--ratio 'RTX 4090': fp8 cannot be timed so: .* int8 makes as many"):
        ratio.refuse_fp8(["fp16", "fp8"], "--ratio 'RTX 4090'")


@pytest.mark.parametrize(("measured", "f32"), [(1340.0, 1361 / 256), (1230.0, 1230 / 256)])
def test_factors_are_the_tables_where_the_gpu_is(gpu, monkeypatch, measured, f32):
    """What was assembled for the table's rates on another machine serves a GPU within 2 % of them."""
    own = {"f32": measured, "f16": 1362.0, "s32": 2720.0}
    monkeypatch.setattr(run, "measure", lambda device, folder: unit.Unit(own, 1776.0))
    found = ratio.ratio_of("5070ti", None, CUDA)
    assert found.factors["f32"] == pytest.approx(f32) and found.measured == own
    assert found.tflops("f32") == pytest.approx(2e-6 * measured / f32 * 132 * 1776)
    assert found.words.startswith("at the ratio of RTX 5070 Ti (")
    assert found.words.endswith("not measured on that card)")


@pytest.mark.parametrize(("card", "form"), [("RTX 3060", "A"), ("RTX 4090", "B"), ("RTX 5070 Ti", "C"), ("GB10", "C")])
def test_the_prebuilt_form_is_the_cards_best_that_runs_here(card, form):
    assert run.prebuilt_form(find(card, "--ratio").gpu, 90) == form


def test_inside_kernels_are_slowed_and_no_more_blocks_share_a_processor(gpu, monkeypatch):
    made = []
    monkeypatch.setattr(run, "slowed", lambda text, factors, sm, *_: made.append((text, dict(factors), sm)) or b"code")
    found = ratio.ratio_of("RTX 5070 Ti", None, CUDA)
    launch._loaded[0, "C", "digest"] = 1
    launching._launchers["a kernel", "C"] = object()
    with found.running() as here:
        assert here == replace(prebuilt("NVIDIA H200", 90, "C"), winograd=True) == target(CUDA)  # as on the card
        assert not launch._loaded and not launching._launchers
        assert gpu.driver.load(0, TEXT.encode(), "products", 40 << 10) == 7
        assert made == [(TEXT, found.factors, 90)]
        assert gpu.driver.loaded == [(b"code", padded(40 << 10, 16))]  # 512 threads: one block where two would fit
        assert gpu.sets.entry("C", None).shared == padded(40 << 10, 8) and gpu.sets.texts("C", "use") == []
        launch._loaded[0, "C", "digest"] = 2
    assert not launch._loaded and gpu.sets.texts("C", "use") == ["a text"]
    assert gpu.sets.entry("C", None).shared == 40 << 10 and "load" not in vars(gpu.driver)


def test_an_error_inside_leaves_nothing(gpu):
    with pytest.raises(RuntimeError, match="inside"), ratio.ratio_of("RTX 5070 Ti", None, CUDA).running():
        raise RuntimeError("inside")
    assert "load" not in vars(gpu.driver) and not targets._instead


def test_tritons_code_is_slowed_too(gpu, monkeypatch):
    """Its products are counted as those of prebuilt kernels are, and each k has a cache of its own."""
    pytest.importorskip("triton")
    from triton.backends.nvidia.compiler import CUDABackend
    from zerowaste_vae.engine.extras.bench import form

    from .test_assemble import HMMA, machine_code

    monkeypatch.setattr(form, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(form, "target", lambda _: prebuilt("NVIDIA H200", 90, "C"))
    keep = [1.0]
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda self, text, *_: machine_code(
        *[HMMA] * (int(keep[0] * text.count("mma.sync")) if text.count("mma.sync") > 12 else 12)))  # fmt: skip
    before = CUDABackend.make_cubin
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    found, folders = ratio.ratio_of("RTX 5070 Ti", "sm_120", CUDA), set()
    for k in (ratio.PLAIN, found.factors):
        with found.scaled(k).running():
            code = CUDABackend.make_cubin(None, TEXT, {"name": "products"}, None, 90)
            assert products(code) == (64 if k["f32"] > 1 else 12)
            folders.add(run.os.environ["TRITON_CACHE_DIR"])
    assert len(folders) == 2 and "TRITON_CACHE_DIR" not in run.os.environ and CUDABackend.make_cubin is before
    keep[0] = 0.5
    with pytest.raises(InputError, match="products: its machine code holds 32 products and should hold 64"), \
            found.running():
        CUDABackend.make_cubin(None, TEXT, {"name": "products"}, None, 90)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_decode_at_the_ratio_has_the_same_bits_and_takes_longer_in_products():
    """The demo VAE's kernels, loaded once more with their products repeated."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    from zerowaste_vae import load
    from zerowaste_vae.engine.extras.bench.subject import noise_latent
    from zerowaste_vae.engine.loader import demo_vae_path

    found = ratio.ratio_of("RTX 5070 Ti", None, torch.device("cuda", 0))
    assert found.measured["f32"] == pytest.approx(RATES["hopper"]["f32"], rel=0.05)
    frames = []
    for k in (ratio.PLAIN, found.factors):
        with found.scaled(k).running() as here:
            vae = load(demo_vae_path(), "fp16", "cuda")
            frames.append(vae.decode(noise_latent(vae.latent_channels, 3, 32, 32)))
            assert here.words in vae.last_report.kernels
    assert torch.equal(*frames)


@pytest.mark.parametrize(("arguments", "words"), [
    (["bench", "decode", "--weights", "demo"], "needs an H100 or H200, not cpu"),
    (["profile", "decode", "--weights", "demo"], "needs an H100 or H200, not cpu"),
    (["bench", "decode", "--peers", "eager"], "the products of peers are not slowed"),
    (["bench", "decode", "--precisions", "fp16", "fp8"], "fp8 cannot be timed so"),
    (["profile", "decode", "--precision", "fp8"], "fp8 cannot be timed so"),
])  # fmt: skip
def test_commands_refuse_in_one_line(capsys, arguments, words):
    assert main([*arguments, "--device", "cpu", "--ratio", "5070ti"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
