"""ComfyUI's process holds the package once, and the folder runs as a program without an installation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def folder(tmp_path):
    """The pack as a folder in custom_nodes, below a path with blanks and CJK; without its large files."""
    folder = tmp_path / "my 模型" / "ComfyUI" / "custom_nodes" / "ComfyUI-ZeroWasteVAE"
    large = shutil.ignore_patterns("__pycache__", "sets", "*.safetensors", "*.mp4")
    shutil.copytree(ROOT / "engine", folder / "engine", ignore=large)
    for name in ("__init__.py", "__main__.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(*command, cwd):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)


def test_the_folder_is_a_program(folder):
    """From ComfyUI's folder, and from inside; nothing is installed."""
    done = run("custom_nodes/ComfyUI-ZeroWasteVAE", "plan", "--size", "64x64", "--vram-gb", "4", cwd=folder.parents[1])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith("64x64, 81 frames")
    wrong = run(".", "plan", "--size", "1", cwd=folder)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_another_name_is_the_same_package(folder):
    """As ComfyUI loads it: under the folder's path. Specs and packages of the modules stay their own."""
    program = f"""
import importlib.util, sys
name, folder = {str(folder).replace(".", "_x_")!r}, {str(folder)!r}
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
pack = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
from importlib import import_module
early = import_module(name + ".engine.errors")
import_module(name + ".engine.extras.compat.one_copy").share(name)
import zerowaste_vae, zerowaste_vae.engine.planning.plan
from zerowaste_vae import InputError, Plan
late = import_module(name + ".engine.planning.plan")
assert zerowaste_vae is pack and InputError is early.InputError and Plan is late.Plan
assert sys.modules["zerowaste_vae.engine.planning.plan"] is late and late.__spec__.name == late.__name__ != NAME
assert late.__package__ == name + ".engine.planning" and pack.__spec__.name == name
try:
    import zerowaste_vae.nothing
except ModuleNotFoundError as error:
    assert error.name == "zerowaste_vae.nothing", error.name
import_module(name + ".engine.extras.compat.one_copy").share(name)
assert sum(type(one).__name__ == "Alias" for one in sys.meta_path) == 1
""".replace("!= NAME", "!= 'zerowaste_vae.engine.planning.plan'")
    done = run("-c", program, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
