"""On a real GPU: the kernels that ship, through NVIDIA's driver alone."""

import ctypes
import importlib.util
import logging
import threading
from dataclasses import replace

import pytest
import torch
from zerowaste_vae import demo_vae_path, load
from zerowaste_vae.engine import log
from zerowaste_vae.engine.extras.bench.form import in_form
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.launching import launcher
from zerowaste_vae.engine.kernels.prebuilt import launch
from zerowaste_vae.engine.kernels.prebuilt.library import SetError, library
from zerowaste_vae.engine.kernels.probe import op
from zerowaste_vae.engine.kernels.targets import ways
from zerowaste_vae.engine.planning.choice import _use

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
DEVICE = torch.device("cuda", 0)
#: Form -> the generation whose code it is, as `bench --as` names it.
GENERATIONS = {"A": "sm_86", "B": "sm_89", "C": "sm_120"}


def there(form):
    """Check that the installed sets have a form and this GPU runs it."""
    try:
        return form in library().serves(targets._card(0)[1]) if torch.cuda.is_available() else False
    except SetError:
        return False


FORMS = [pytest.param(form, marks=pytest.mark.skipif(not there(form), reason=f"set {form} is not here"))
         for form in GENERATIONS]  # fmt: skip


def vae_of(kernels, precision="fp16", **options):
    vae = load(demo_vae_path(), precision=precision, device="cuda")
    vae.options = replace(vae.options, kernels=kernels, **options)
    return vae


@pytest.fixture
def z():
    return torch.randn(1, 16, 9, 16, 20, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def fresh(monkeypatch):
    """Nothing has been tried or has failed, before and after."""
    monkeypatch.setattr(targets, "_off", {})
    monkeypatch.setattr(op, "_tried", set())
    monkeypatch.setattr(log, "_said", set())
    targets._ways.cache_clear()
    yield
    targets._off.clear()
    targets._ways.cache_clear()


@pytest.mark.parametrize(("form", "precision"), [
    pytest.param(*form.values, precision, marks=form.marks)
    for form in FORMS for precision in ("fp16", "bf16", "int8", "fp8") if (*form.values, precision) != ("A", "fp8")
])  # fmt: skip
def test_every_plan_has_the_same_bits(form, precision, z):
    vae = vae_of(form, precision)
    whole = vae.decode(z)
    assert vae.last_report.kernels == f"prebuilt kernels, set {form}" and vae.last_report.mode.startswith("fused")
    peak = vae.plan_decode(9, 16, 20).peak_bytes / 2**30
    plans = {"again": {}, "one by one": {"chunk": 1}, "bands": {"tiling": "exact", "tile": 64, "ram_gb": 8},
             "parked": {"vram_gb": 0.8 * peak, "ram_gb": 8}}  # fmt: skip
    assert [name for name, options in plans.items() if not torch.equal(vae.decode(z, **options), whole)] == []
    vae.options = replace(vae.options, cuda_graphs=False)
    assert torch.equal(vae.decode(z), whole)
    encoded = vae.encode(whole[0])
    assert vae.last_report.kernels == f"prebuilt kernels, set {form}" and torch.isfinite(encoded).all()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("winograd", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_bits_equal_tritons(form, winograd, z):
    """Its bits are those of Triton's code of that generation. winograd: by default it depends on the card, too."""
    import triton

    if triton.__version__ != library().triton:
        pytest.skip(f"the sets are made with Triton {library().triton}, and {triton.__version__} is here")
    ours = vae_of(form, winograd=winograd).decode(z)
    with in_form(GENERATIONS[form], DEVICE):
        assert torch.equal(vae_of("triton", winograd=winograd).decode(z), ours)


@pytest.mark.parametrize("form", FORMS)
def test_streams_and_threads_do_not_move_a_bit(form, z):
    vae = vae_of(form)
    whole, out = vae.decode(z), {}
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(vae.decode(z), whole)
    threads = [threading.Thread(target=lambda i=i: out.update({i: vae.decode(z)})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(out) == [0, 1, 2] and all(torch.equal(one, whole) for one in out.values())


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_read_while_a_vae_is_loaded(form, z, monkeypatch):
    """And given back once the kernels are loaded, from the first run of a component on."""
    monkeypatch.setattr(launch, "_complete", set())
    vae = vae_of(form)
    mode = vae._mixed.mode
    uses = {half: (form, _use(vae.planner.walk, half, mode)) for half in ("decoder", "encoder")}
    assert all(place in library()._ahead for place in uses.values())
    whole = vae.decode(z)
    assert [half for half, place in uses.items() if place in library()._ahead] == ["encoder"]
    vae.encode(whole[0])
    assert not any(place in library()._ahead for place in uses.values())
    vae.release()
    assert torch.equal(vae.decode(z), whole)
    assert not any(place in library()._ahead for place in uses.values())


@pytest.mark.parametrize("form", FORMS)
def test_launch_from_any_thread(form):
    """Threads without a context, or with another one, launch as well."""
    driver = ctypes.CDLL("libcuda.so.1")
    here = next(one for one in ways(DEVICE, form) if one.set == form)
    x, out = torch.arange(128, dtype=torch.float32, device=DEVICE), torch.zeros(3, 128, device=DEVICE)
    torch.cuda.synchronize()

    def double(row):
        launcher("probe.doubling_kernel", here)[(1,)](x, out[row], N=128, num_warps=4)

    double(0)
    thread = threading.Thread(target=double, args=(1,))
    thread.start()
    thread.join()
    other, number = ctypes.c_void_p(), ctypes.c_int()
    assert driver.cuDeviceGet(ctypes.byref(number), 0) == 0
    assert driver.cuCtxCreate_v2(ctypes.byref(other), 0, number) == 0
    try:
        double(2)
    finally:
        driver.cuCtxDestroy_v2(other)
    torch.cuda.synchronize()
    assert torch.equal(out, 2 * x.expand(3, 128))


@pytest.mark.parametrize("form", FORMS)
def test_refused_text_gives_way(form, z, fresh, monkeypatch, caplog):
    """In the middle of a run: what has been made stays, and its own words are said."""
    expected = vae_of("plain").decode(z)
    preload = launch._preload

    def refusing(device, form, texts, threads):
        spoilt = [text._replace(ptx=text.ptx.replace(b".version 8", b".version 99", 1)) for text in texts[6:]]
        return preload(device, form, [*texts[:6], *spoilt], threads)

    monkeypatch.setattr(launch, "_preload", refusing)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "_complete", set())
    monkeypatch.setattr("zerowaste_vae.engine.kernels.launching._launchers", {})
    vae = vae_of(form)
    with caplog.at_level(logging.WARNING):
        out = vae.decode(z)
    lines = [record.message for record in caplog.records if "the driver refuses" in record.message]
    assert lines and "CUDA error" in lines[0] and "\n" not in lines[0]
    assert not vae.last_report.kernels.startswith(f"prebuilt kernels, set {form}") and vae.last_report.complete
    assert float((out - expected).abs().max()) < 0.05


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("graphs", [True, False])
def test_kernels_that_were_compiled_together(form, graphs, z, monkeypatch):
    """As if the driver's cache had lacked all of them: they give the bits of those that were loaded one by one, also in
    graphs, and none is loaded by itself again."""
    whole = vae_of(form, cuda_graphs=graphs).decode(z)
    load_one, alone = launch.driver().load, []
    monkeypatch.setattr(launch, "_CACHED_SECONDS", -1.0)
    monkeypatch.setattr(launch.driver(), "load", lambda *of: alone.append(of) or load_one(*of))
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "_complete", set())
    monkeypatch.setattr("zerowaste_vae.engine.kernels.launching._launchers", {})
    vae = vae_of(form, cuda_graphs=graphs)
    assert torch.equal(vae.decode(z), whole) and torch.equal(vae.decode(z), whole)
    assert vae.last_report.kernels.startswith(f"prebuilt kernels, set {form}")
    assert len(launch._loaded) > 20 and len(alone) == 1
