"""The hardware survey tells the truth here and about machines described to it."""

import builtins
import platform
import sys
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.system import hardware
from zerowaste_vae.engine.system.hardware import Gpu, runs_on, survey
from zerowaste_vae.engine.system.memory import GIB

CARD = Gpu(0, "NVIDIA GeForce RTX 5070 Ti", 120, 16 * GIB, 15 * GIB, runnable=True)


def test_survey_of_this_machine():
    seen = survey()
    assert seen.torch == torch.__version__ and seen.python == platform.python_version()
    assert seen.cores >= 1 and (seen.ram_free is None or seen.ram_free > 0)
    assert len(seen.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert (seen.gpu_problem is None) == any(gpu.runnable for gpu in seen.gpus)
    assert set(seen.packages) == {"triton", "flash-attn", "comfy-kitchen"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_survey_of_a_gpu():
    gpu = survey().gpus[0]
    major, minor = torch.cuda.get_device_capability(0)
    assert (gpu.name, gpu.sm) == (torch.cuda.get_device_name(0), 10 * major + minor)
    assert 0 < gpu.free <= gpu.total


def test_fast_paths_name_their_reason():
    here = survey()
    without = replace(here, gpus=(), gpu_problem="torch 9.9+cpu is a CPU build")
    paths = {path.name: path for path in without.fast_paths}
    assert not paths["GPU"].on and "CPU build" in paths["GPU"].reason and not paths["fp16"].on
    paths = {path.name: path for path in replace(here, gpus=(CARD,), gpu_problem=None).fast_paths}
    assert paths["GPU"].on and paths["fp16"].on and "sm_120" in paths["GPU"].reason
    too_new = replace(here, gpus=(replace(CARD, runnable=False),), gpu_problem="torch holds no code for it (sm_120)")
    paths = {path.name: path for path in too_new.fast_paths}
    assert not paths["GPU"].on and "sm_120" in paths["GPU"].reason
    assert all(path.reason for path in without.fast_paths)


def test_triton():
    """Triton kernels are on only where they run."""
    card = replace(survey(), gpus=(CARD,), gpu_problem=None)
    on = replace(card, kernels=True, kernel_limits=()).fast_paths[-1]
    assert on.on and "fp16" in on.reason
    off = replace(card, kernels=False, kernel_limits=("Triton is not installed",)).fast_paths[-1]
    assert not off.on and "Triton is not installed" in off.reason
    without = replace(card, gpus=(), gpu_problem="no driver", kernels=False).fast_paths[-1]
    assert not without.on and "GPU" in without.reason


@pytest.mark.parametrize(
    ("sm", "built_for", "runs"),
    [
        (90, ["sm_80", "sm_90a"], True),
        (86, ["sm_80", "sm_90"], True),
        (89, ["sm_90"], False),
        (120, ["sm_80", "sm_90"], False),
        (120, ["sm_80", "compute_90"], True),
        (120, ["sm_120f"], True),
        (75, [], False),
        (75, ["gfx942"], False),
    ],
)
def test_which_builds_run_on_which_gpu(sm, built_for, runs):
    assert runs_on(sm, built_for) is runs


def test_a_broken_torch_does_not_raise(monkeypatch):
    def broken(*_):
        raise OSError("libcuda is damaged")

    for name in ("is_available", "device_count", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, broken)
    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    seen = survey()
    assert seen.gpus == () and seen.gpu_problem and not seen.fast_paths[0].on


def test_a_missing_torch_does_not_raise(monkeypatch):
    real = builtins.__import__

    def without_torch(name, *args, **kwargs):
        if name == "torch":
            raise ImportError("no torch")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    seen = survey()
    monkeypatch.undo()
    assert seen.torch is None and seen.gpu_problem == "torch is not installed"


def test_silent_driver(monkeypatch):
    """A gpu whose driver does not answer is still listed."""
    class Properties:
        name, major, minor, total_memory = "GPU", 9, 0, 8 * GIB

    def busy(_):
        raise RuntimeError("all CUDA-capable devices are busy")

    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_arch_list": lambda: ["sm_90"],
        "get_device_properties": lambda _: Properties,
        "mem_get_info": busy,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert hardware._gpus() == (Gpu(0, "GPU", 90, 8 * GIB, None, True),)


@pytest.mark.parametrize("build, driver, said", [(None, True, True), (None, False, False), ("12.8", True, False)])
def test_a_torch_for_cpus_alone_has_a_cure(monkeypatch, build, driver, said):
    """Beside NVIDIA's driver; on machines without one such a build is right."""
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hardware, "_has_nvidia", lambda: driver)
    cure = hardware.survey().cure
    assert bool(cure) == said
    assert not said or f'"{sys.executable}" -m pip' in cure
    assert not said or cure.endswith("-m pip install --force-reinstall torch --index-url " + hardware.CUDA_WHEELS)
    from zerowaste_vae.engine.extras.cli.info import describe_hardware

    assert (("cure", cure) in list(describe_hardware(hardware.survey()))) == said
