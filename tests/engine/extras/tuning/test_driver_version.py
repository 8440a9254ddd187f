"""The driver's version without a process, and programs without a window, as Windows would have them."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from zerowaste_vae.engine.extras.bench import peers
from zerowaste_vae.engine.extras.tuning import kept, processes
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.system.hardware import no_window


class Nvml:
    """The library that comes with the driver; `codes` are what its functions return."""

    def __init__(self, name, *codes):
        self.name, (self.began, self.told) = name, codes

    def nvmlInit_v2(self):
        return self.began

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"572.16"
        assert size == len(text)
        return self.told

    def nvmlShutdown(self):
        return 0


@pytest.fixture(params=["win32", "linux"])
def system(request, monkeypatch):
    monkeypatch.setattr(sys, "platform", request.param)

    def none(path, *_, **__):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", none)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a plan starts no process"))
    kept.driver.cache_clear()
    yield request.param
    kept.driver.cache_clear()


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), "572.16"), ((9, 0), "CUDA 12080"), ((0, 3), "CUDA 12080")])
def test_the_drivers_own_library_says_it(system, monkeypatch, codes, expected):
    """As nvidia-smi does, so that tunings stay; where it cannot, the CUDA that the driver has."""
    opened = []

    def library(name):
        opened.append(name)
        return Nvml(name, *codes)

    monkeypatch.setattr(ctypes, "WinDLL" if system == "win32" else "CDLL", library, raising=False)
    monkeypatch.setattr(kept, "cuda_driver", lambda: SimpleNamespace(version=lambda: 12080))
    assert kept.driver() == expected and opened == ["nvml.dll" if system == "win32" else "libnvidia-ml.so.1"]


def test_nothing_says_it(system, monkeypatch):
    def none(*_):
        raise OSError("no such library")

    def no_driver():
        raise PrebuiltError("there is none")

    monkeypatch.setattr(ctypes, "WinDLL" if system == "win32" else "CDLL", none, raising=False)
    monkeypatch.setattr(kept, "cuda_driver", no_driver)
    assert kept.driver() == "unknown"


@pytest.mark.parametrize("platform", ["win32", "linux"])
def test_programs_open_no_window(monkeypatch, platform):
    """nvidia-smi, the tuner's workers and ComfyUI as a peer. On Windows no bare name is looked for in this folder."""
    seen = []

    def run(command, **options):
        seen.append((Path(command[0].replace("\\", "/")).name, options["creationflags"]))
        raise OSError(2, "none")

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("SYSTEMROOT", "C:\\Windows")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(subprocess, "Popen", run)
    assert kept.nvidia_smi("driver_version") == []
    with pytest.raises(processes.ZeroWasteError):
        processes.Worker("run", "0")
    assert "error" in peers._run("python", {})
    flag = 0x08000000 if platform == "win32" else 0
    assert no_window() == flag and [given for _, given in seen] == [flag] * 3
    assert seen[0][0] == ("nvidia-smi.exe" if platform == "win32" else "nvidia-smi")
