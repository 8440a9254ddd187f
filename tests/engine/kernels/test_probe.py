"""Triton that is there and does not work: found out once, explained, and done without."""

import contextlib
import logging

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine import log
from zerowaste_vae.engine.kernels import cure as words
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.kernels.prebuilt.library import SetError
from zerowaste_vae.engine.kernels.probe import from_kernels, op, proven
from zerowaste_vae.engine.kernels.targets import target
from zerowaste_vae.engine.planning.fusable import why_off
from zerowaste_vae.engine.runtime import context as run_module

GPU = torch.device("cuda", 3)


def raised_by_triton(error):
    """A function that fails with frames of Triton's in its traceback."""
    space = {"__name__": "triton.compiler.fake", "error": error}
    exec("def fail(*args, **options):\n    raise error", space)
    return space["fail"]


@pytest.fixture
def gpu(monkeypatch):
    """One that should run kernels and has not been tried; `launched` counts first kernels."""
    monkeypatch.setattr(targets, "_off", {})
    monkeypatch.setattr(op, "_tried", set())
    monkeypatch.setattr(targets, "_card", lambda _: ("a GPU", 90))
    monkeypatch.setattr(targets, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(targets, "_not_there", lambda form: "no sets here")
    targets._ways.cache_clear()
    launched = []
    monkeypatch.setattr(op, "_run", lambda device, here: launched.append(device))
    yield launched
    targets._ways.cache_clear()


def test_one_kernel_proves_it(gpu):
    assert proven(GPU).kernels and proven(GPU) == target(GPU)
    assert gpu == [GPU]


@pytest.mark.parametrize(("environment", "programs", "header", "cure"), [
    ({}, [], True, "There is no C compiler"),
    ({"CC": "/no/cc"}, ["gcc"], True, "CC names /no/cc"),
    ({}, ["gcc"], False, "Python.h is missing"),
    ({"CC": "gcc"}, ["gcc"], True, "Triton compiles with CC=gcc"),
    ({}, ["clang"], True, "newer driver"),
])  # fmt: skip
def test_what_fails_is_off_with_cause_and_cure(gpu, monkeypatch, tmp_path, environment, programs, header, cure):
    error = RuntimeError("Failed to find C compiler.\nmore")
    monkeypatch.setattr(op, "_run", lambda *_: gpu.append(1) or raised_by_triton(error)())
    monkeypatch.delenv("CC", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(words.shutil, "which", lambda name: name if name in programs else None)
    monkeypatch.setattr(words.sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    if header:
        (tmp_path / "Python.h").touch()
    assert why_off("seedvr2", None, torch.float16, GPU) is None  # asked without a try
    for _ in range(2):
        reason = why_off("seedvr2", None, torch.float16, GPU, False, True)
        assert "RuntimeError: Failed to find C compiler." in reason and cure in reason and "\n" not in reason
    assert gpu == [1]
    assert why_off("seedvr2", None, torch.float16, GPU) == reason
    assert not target(GPU).supports(torch.float16) and target(GPU).sm == 90 and reason.endswith("; no sets here")
    assert target("cuda:2").kernels


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_full_machine_proves_nothing(gpu, monkeypatch, error):
    monkeypatch.setattr(op, "_run", raised_by_triton(error))
    assert proven(GPU).kernels and target(GPU).kernels
    monkeypatch.setattr(op, "_run", raised_by_triton(OSError("no")))
    assert not proven(GPU).kernels


def test_whose_error_it_is():
    def refuse(kind):
        raise kind("no")

    for fail, expected in ((raised_by_triton(ValueError("x")), True), (lambda: [][0], False),
                           (lambda: refuse(PrebuiltError), True), (lambda: refuse(SetError), True)):  # fmt: skip
        with pytest.raises(Exception) as caught:
            fail()
        assert from_kernels(caught.value) is expected


# -- a kernel that fails later -----------------------------------------------------------------------------------------


@pytest.fixture
def vae(vae_file, monkeypatch):
    """On the fused path, until its kernels are switched off."""
    monkeypatch.setattr(targets, "_off", {})
    monkeypatch.setattr(log, "_said", set())
    cpu = torch.device("cpu"), "triton"
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: targets._off.get(cpu))
    return load(vae_file, device="cpu")


@pytest.mark.parametrize(("name", "call"), [("conv3d", 1), ("norm_act", 40), ("to_pixels", 2)])
def test_failing_compiler(vae, noise, monkeypatch, caplog, name, call):
    """A kernel that does not compile leaves the rest to torch."""
    z = noise(1, 16, 3, 2, 2)
    expected = load(vae.path, device="cpu").decode(z, chunk=1)
    original, calls = getattr(run_module, name), []
    fail = raised_by_triton(RuntimeError("PassManager::run failed"))
    with monkeypatch.context() as patch:
        counted = lambda *a, **o: calls.append(1) or (fail if len(calls) == call else original)(*a, **o)  # noqa: E731
        patch.setattr(run_module, name, counted)
        with caplog.at_level(logging.WARNING):
            out = vae.decode(z, chunk=1)
    assert len(calls) == call
    torch.testing.assert_close(out, expected, rtol=0, atol=1.5e-5)
    assert vae.last_report.complete and vae.last_report.mode.startswith("plain torch")
    assert "PassManager::run failed" in dict(vae.last_report.off)["triton_fusion"]
    assert vae.packed_bytes == 0 and vae.fused() is None
    calls.clear()
    vae.encode(noise(5, 16, 16, 3).sigmoid())
    assert vae.last_report.mode.startswith("plain torch")


@pytest.mark.parametrize("error", [
    PrebuiltError("the driver refuses conv_kernel: too new"), SetError("A.x.xz is damaged; install again"),
], ids=["driver", "file"])  # fmt: skip
def test_failing_prebuilt(vae, noise, monkeypatch, error):
    """Results made so far stay, and nothing is read or launched again that way."""
    z, calls, original = noise(1, 16, 3, 2, 2), [], run_module.to_pixels
    expected = load(vae.path, device="cpu").decode(z, chunk=1)

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(run_module, "to_pixels", failing)
    out = vae.decode(z, chunk=1)
    assert len(calls) == 2 and vae.last_report.complete
    torch.testing.assert_close(out, expected, rtol=0, atol=1.5e-5)
    assert str(error) in dict(vae.last_report.off)["triton_fusion"] and vae.fused() is None


def test_other_errors_pass_and_switch_nothing_off(vae, noise, monkeypatch):
    for fail, kind in (
        (raised_by_triton(torch.OutOfMemoryError("out of memory")), None),
        (lambda *_, **__: [][0], IndexError),
    ):
        with monkeypatch.context() as patch:
            original, calls = run_module.to_pixels, []
            once = lambda *a, **o: calls.append(1) or (fail if len(calls) == 1 else original)(*a, **o)  # noqa: E731, B023
            patch.setattr(run_module, "to_pixels", once)
            with pytest.raises(kind) if kind else contextlib.nullcontext():
                vae.decode(noise(1, 16, 1, 1, 1))
        assert targets._off == {}
