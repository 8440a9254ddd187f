"""The wheel: it builds, installs, imports and decodes in a folder of its own, and tells a user's script its types."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.extras.media.mp4 import write_mp4

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "users" / "script.py"
TOP = ("assets", "engine", "nodes")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the files of the wheel, as pip lays them out; it is built from a copy, which setuptools writes to.
    """
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building a wheel needs setuptools and pip here")
    folder = tmp_path_factory.mktemp("wheel")
    for name in TOP:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / "source" / path.name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
               "-w", str(folder), str(folder / "source")]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def environment(site):
    """Without this checkout."""
    return {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def test_a_script_of_a_user_runs(installed, tmp_path, vae_file):
    """Nothing of ComfyUI is asked for."""
    write_mp4(tmp_path / "clip.mp4", torch.rand(5, 16, 16, 3), 25)
    program = (f"import runpy, sys; sys.argv[1:] = {[str(vae_file), str(tmp_path / 'clip.mp4'), str(tmp_path)]!r}\n"
               f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
               "import zerowaste_vae; print(zerowaste_vae.__file__)\n"
               "print([n for n in sys.modules if n.split('.')[0] in ('comfy', 'comfy_api', 'server', 'folder_paths')])")
    done = subprocess.run([sys.executable, "-c", program], env=environment(installed), cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    *said, where, foreign = done.stdout.splitlines()
    assert Path(where) == installed / "zerowaste_vae" / "__init__.py" and foreign == "[]"
    assert any(line.startswith("<Plan plain torch, untiled") for line in said)
    assert (tmp_path / "result.mp4").stat().st_size > 0


def test_the_command_of_the_wheel(installed, tmp_path):
    done = subprocess.run([sys.executable, "-m", "zerowaste_vae", "--version"], env=environment(installed),
                          cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("zerowaste-vae 0.")


def test_what_the_wheel_holds(installed):
    """Its types and data, and neither tests nor tools."""
    (about,) = installed.glob("*.dist-info")
    assert "zerowaste-vae = zerowaste_vae.engine.extras.cli:main" in (about / "entry_points.txt").read_text()
    package = installed / "zerowaste_vae"
    assert (package / "py.typed").exists() and not (package / "tests").exists() and not (package / "tools").exists()
    for name in ("assets/demo_vae.safetensors", "engine/extras/bench/ratio.json", "engine/extras/media/mp4.py"):
        assert (package / name).read_bytes() == (ROOT / name).read_bytes()


def test_strict_types_of_a_users_script(installed, tmp_path):
    """mypy --strict passes a user's script against the installed package, and finds a wrong option in another."""
    mypy = shutil.which("mypy")
    if mypy is None:
        pytest.skip("mypy is not on the PATH")
    right, wrong = shutil.copy(SCRIPT, tmp_path), tmp_path / "wrong.py"
    wrong.write_text(
        "import torch\nimport zerowaste_vae\nvae = zerowaste_vae.load('x')\n"
        "vae.decode(torch.zeros(1), tilling='auto')\nvae.encode(torch.zeros(1), tiling='best', vram_gb='3')\n"
    )
    command = [mypy, "--strict", "--python-executable", sys.executable, "--cache-dir", str(tmp_path / "cache")]
    done = [subprocess.run([*command, str(script)], env=environment(installed), cwd=tmp_path, capture_output=True,
                           text=True) for script in (right, wrong)]  # fmt: skip
    assert done[0].returncode == 0, done[0].stdout + done[0].stderr
    assert 'Unexpected keyword argument "tilling" for "decode"' in done[1].stdout
    assert done[1].stdout.count("[arg-type]") == 2, done[1].stdout
