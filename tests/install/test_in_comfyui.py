"""The ways into a ComfyUI, followed from docs/install.md: what it says works, and goes away without a trace."""

import shutil
import sys

import pytest

from .conftest import commit
from .machine import FIRST, SECOND, Machine, embedded_python, state, usual_python
from .page import Section, stated

NAME = "ComfyUI-ZeroWasteVAE"
#: ComfyUI loads the folder under a name of its own. One file is then one module, whoever imports it.
ONE_COPY = """
import importlib.util, sys
from importlib import import_module
folder = sys.argv[1]
name = folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
pack = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
import_module(name + ".engine.extras.compat.one_copy").share(name)
import zerowaste_vae
from zerowaste_vae.engine.extras import cli
files = {}
for module in [m for m in sys.modules.values() if getattr(m, "__file__", None)]:
    if module.__file__.startswith(folder):
        assert files.setdefault(module.__file__, module) is module, module.__file__
assert zerowaste_vae is pack and len(files) > 5
"""


def comfyui(machine, inside="."):
    """Make the folders of a ComfyUI and return the first."""
    folder = machine.folder / inside / "ComfyUI"
    (folder / "custom_nodes").mkdir(parents=True)
    return folder


def one_copy(machine, python, folder):
    (machine.folder / "one_copy.py").write_text(ONE_COPY)
    machine.run(f'{python} one_copy.py "{folder}"', machine.folder)


def nothing_at_home(machine):
    """Neither caches nor settings."""
    assert list(machine.home.rglob("*")) == []


def test_git_and_the_command(machine, repository, release):
    """Installed, updated and uninstalled, with the short command and without; every module once in ComfyUI's process,
    and its Python as it was."""
    comfy, python = comfyui(machine), usual_python(machine.folder / "python")
    machine.has("python", python)
    pack, before = comfy / "custom_nodes" / NAME, state(python, machine)
    git, command = Section("git"), Section("The command inside ComfyUI")
    install = git.take(3).replace("URL_OF_THIS_REPOSITORY", f"file://{repository}")
    machine.run(install, machine.folder)
    assert state(python, machine) == before
    size = sum(path.stat().st_size for path in pack.rglob("*") if path.is_file())
    assert size == pytest.approx(stated("a clone with `--depth 1`"), rel=0.1)
    assert "free RAM" in machine.run(command.take(), comfy)
    module = command.take()
    machine.run(command.take(), comfy)
    machine.has("zerowaste-vae", python.parent / "zerowaste-vae")
    for line in ("zerowaste-vae --version", f"{module} --version"):
        assert machine.run(line, machine.home) == FIRST
    one_copy(machine, "python", pack)
    release(repository)
    commit(repository, "Second")
    assert git.says("`git pull` in the folder, then the last line again. **Uninstall**: delete the folder.")
    machine.run(git.take(), pack)
    machine.run(install.splitlines()[-1], pack.parent)
    assert git.left == []
    for line in ("zerowaste-vae --version", f"{module} --version", f'python "{pack}" --version'):
        assert machine.run(line, machine.home) == SECOND
    machine.run(command.take(), comfy, said="y\n")
    shutil.rmtree(pack)
    assert state(python, machine) == before
    nothing_at_home(machine)


@pytest.fixture
def portable(place):
    """portable(git) -> a machine with the folders of the portable version, and its Python."""
    if sys.version_info < (3, 11):
        pytest.skip("on Linux Python 3.10 reads no ._pth file, by which an embedded Python knows its places")

    def made(git):
        machine = Machine(place, git)
        comfyui(machine, "ComfyUI_windows_portable")
        return machine, embedded_python(machine.folder / "ComfyUI_windows_portable" / "python_embeded")

    return made


def test_portable_with_git(portable, repository):
    machine, python = portable(git=True)
    nodes, before = python.parents[1] / "ComfyUI" / "custom_nodes", state(python, machine)
    machine.run(Section("Windows portable").take(2).replace("URL_OF_THIS_REPOSITORY", f"file://{repository}"), nodes)
    assert machine.run(f'"{python}" "{nodes / NAME}" --version', machine.home) == FIRST
    assert state(python, machine) == before


def test_portable_without_git(portable, release, unpack):
    """The archive in the place of a clone, then the command; the folder is deleted before the command is."""
    machine, python = portable(git=False)
    top = python.parents[1]
    nodes, before = top / "ComfyUI" / "custom_nodes", state(python, machine)
    page, command = Section("Windows portable"), Section("The command inside ComfyUI")
    assert page.says("Without git, unpack the archive there under that name in place of the first line")
    assert page.says("to update, delete the folder and unpack the new archive.")
    assert "git clone" in page.take()
    unpack(nodes / NAME)
    machine.run(page.take(), nodes)
    assert page.left == [] and state(python, machine) == before
    assert "zerowaste_vae" in command.take(4)  # those of another Python
    assert "free RAM" in machine.run(command.take(), top)
    machine.run(command.take(), top)
    assert "free RAM" in machine.run(command.take(), top)
    module = f'"{python}" -m zerowaste_vae --version'
    assert machine.run(module, machine.home) == FIRST
    one_copy(machine, f'"{python}"', nodes / NAME)
    shutil.rmtree(nodes / NAME)
    unpack(nodes / NAME)
    release(nodes / NAME)
    assert machine.run(module, machine.home) == SECOND
    shutil.rmtree(nodes / NAME)
    machine.run(command.take(), top, said="y\n")
    assert command.left == [] and state(python, machine) == before
    nothing_at_home(machine)
