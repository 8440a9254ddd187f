"""Installations without a ComfyUI, followed from docs/install.md."""

import shutil
import sys

import pytest
from zerowaste_vae.engine.system.hardware import CUDA_WHEELS

from .machine import FIRST, LIB, SECOND, shelf, state, usual_python
from .page import Section, stated


def test_stand_alone(machine, release, unpack):
    """From the archive. Its second version is older than what the first has built, by the times of its files."""
    page, folder = Section("Stand-alone"), machine.folder / "archive"
    machine.has("python3", sys.executable)
    unpack(folder)
    before = {path.name for path in folder.iterdir()}
    machine.run(page.take(), folder)
    python = folder / "env" / "bin" / "python"
    places = python.parent.parent / LIB / "site-packages"
    shelf(machine.folder / "shelf")  # stands for what pip would bring: PyTorch, and a setuptools that it takes
    (places / "shelf.pth").write_text(str(machine.folder / "shelf"))
    machine.run("env/bin/python -m pip uninstall -y setuptools", folder)
    clean, install = state(python, machine), page.take()
    machine.run(install, folder)
    assert "free RAM" in machine.run(page.take(), folder)
    module, file = "env/bin/python -m zerowaste_vae --version", "import zerowaste_vae; print(zerowaste_vae.__file__)"
    assert machine.run(module, folder) == FIRST
    assert machine.run(f"../archive/env/bin/python -c '{file}'", machine.home).startswith(str(places))
    unpack(folder)
    release(folder)
    assert page.says('**Update**: `git pull`, or the new archive, then the line with `".[standalone]"` again.')
    machine.run(install, folder)
    assert machine.run(module, folder) == machine.run("env/bin/zerowaste-vae --version", folder) == SECOND
    machine.run("env/bin/python -m pip uninstall -y zerowaste-vae", folder)
    assert state(python, machine) == clean
    windows = page.take(4).splitlines()
    assert windows[0].split()[1:] == ["-m", "venv", "env"] and windows[2] == install.replace("3", "")
    assert windows[1].endswith(f"pip install torch --index-url {CUDA_WHEELS}")  # followed on no Linux: it has a network
    assert page.says("**Uninstall**: delete the folders `env`, `build` and `zerowaste_vae.egg-info`.")
    for name in ("env", "build", "zerowaste_vae.egg-info"):
        shutil.rmtree(folder / name)
    assert {path.name for path in folder.iterdir()} == before
    assert list(machine.home.rglob("*")) == []


def test_a_python_of_yours(machine, archive, unpack):
    """Beside what is there; the wheel, too. Archive and wheel are as large as the page says."""
    page, folder = Section("pip, into a Python of yours"), machine.folder / "archive"
    python = usual_python(machine.folder / "python")
    machine.has("python", python)
    unpack(folder)
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert archive.stat().st_size == pytest.approx(stated("the archive of the registry"), abs=2e6)
    names = {path.name for path in folder.iterdir()}
    assert sum(sizes.values()) == pytest.approx(stated("MB packed,"), abs=2e6)
    kernels = sum(size for path, size in sizes.items() if "sets" in path.parts)
    assert kernels == pytest.approx(stated("unpacked:"), abs=2e6)
    before = state(python, machine)
    place = f'"{folder}"'
    machine.run(page.take().replace("PATH_OF_THIS_FOLDER", place), machine.home)
    assert "free RAM" in machine.run(page.take(), machine.home)
    wheels = machine.folder / "wheels"
    wheels.mkdir()
    machine.run(page.take().replace("PATH_OF_THIS_FOLDER", place), wheels)
    (wheel,) = wheels.glob("zerowaste_vae-*.whl")
    assert wheel.stat().st_size == pytest.approx(stated("makes a wheel of"), abs=2e6)
    machine.run(page.take(), machine.home, said="y\n")
    assert page.left == [] and state(python, machine) == before
    assert page.says("Building leaves `build` and `zerowaste_vae.egg-info` in the folder.")
    assert {path.name for path in folder.iterdir()} - names == {"build", "zerowaste_vae.egg-info"}
    assert list(machine.home.rglob("*")) == []
