"""A machine with Python, a shelf of packages and nothing else: no network, no settings of a user."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from zerowaste_vae import __version__

ROOT = Path(__file__).resolve().parents[2]
#: What is ours, and what an installation leaves for itself.
OURS = ("zerowaste", "__editable__")
#: What the command says of its version, and of the next one's.
FIRST, SECOND = f"zerowaste-vae {__version__}\n", "zerowaste-vae 99.0.0\n"
LIB = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}"


class Machine:
    """Programs run with PATH of its own folder `bin` alone."""

    def __init__(self, folder: Path, git: bool = True) -> None:
        """folder: where it lies, made here. git: whether it has git."""
        self.folder, self.bin, self.home = folder, folder / "bin", folder / "home"
        self.index = folder.parent / "index"  # pip ends a place's name at a space, in a variable
        for path in (self.bin, self.home, self.index, folder / "tmp"):
            path.mkdir(parents=True)
        if git:
            (self.bin / "git").symlink_to(shutil.which("git"))
        as_wheel("setuptools", self.index)

    def has(self, name: str, python: Path) -> None:
        """Let the commands of pages find a Python by that name."""
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        (self.bin / name).chmod(0o755)

    def run(self, script: str, cwd: Path, code: int = 0, said: str = "") -> str:
        """Return what a script's standard output holds; it stops at the first line that fails. said: to standard
        input."""
        env = {
            "PATH": str(self.bin), "HOME": str(self.home), "TMPDIR": str(self.folder / "tmp"), "LANG": "C.UTF-8",
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PIP_NO_COMPILE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_CONFIG_FILE": os.devnull, "OMP_NUM_THREADS": "1", "GIT_CONFIG_NOSYSTEM": "1",
        }  # fmt: skip
        if "LD_LIBRARY_PATH" in os.environ:  # where some Pythons find their own library
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        done = subprocess.run(["/bin/bash", "-euc", script], cwd=cwd, env=env, input=said, capture_output=True,
                              text=True)  # fmt: skip
        assert done.returncode == code, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout


def shelf(place: Path) -> None:
    """Fill a folder with links to the packages of the tests' Python, without our own."""
    place.mkdir(parents=True, exist_ok=True)
    for folder in dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib"))):
        for path in Path(folder).iterdir():
            if not path.name.startswith(OURS) and path.suffix != ".pth" and not (place / path.name).exists():
                (place / path.name).symlink_to(path)


def as_wheel(name: str, folder: Path) -> None:
    """Write an installed package as the wheel that it came as."""
    package = importlib.metadata.distribution(name)
    with zipfile.ZipFile(folder / f"{name}-{package.version}-py3-none-any.whl", "w") as wheel:
        record = []
        for file in package.files:
            if ".dist-info/RECORD" in str(file) or "__pycache__" in file.parts or ".." in file.parts:
                continue
            data = file.locate().read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(data)}\n")
            wheel.writestr(str(file), data)
        about = f"{name}-{package.version}.dist-info/RECORD"
        wheel.writestr(about, "".join([*record, f"{about},,\n"]))


def usual_python(place: Path) -> Path:
    """Make a Python of its own, with the packages of the shelf, as a ComfyUI has it."""
    venv.create(place, symlinks=True)
    shelf(place / LIB / "site-packages")
    return place / "bin" / "python"


def embedded_python(place: Path) -> Path:
    """Make `place` what `python_embeded` is: a Python whose `._pth` file names all places that it knows (so no variable
    of the environment adds one, and no folder of a script), with the packages of the shelf."""
    shelf(place / LIB / "site-packages")
    (place / "bin").mkdir()
    program = place / "python.exe"
    shutil.copy(os.path.realpath(sys.executable), program)
    library = sysconfig.get_path("stdlib")
    known = ("../ComfyUI", library, f"{library}/lib-dynload", ".", "import site")
    program.with_name("python.exe._pth").write_text("\n".join(known) + "\n")
    return program


def state(python: Path, machine: Machine) -> dict[str, tuple[int, int] | str]:
    """Return what lies in a Python's folders, with size and time, and which packages it names."""
    top = python.parent if python.name == "python.exe" else python.parent.parent
    found = (path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())
    files = {str(path.relative_to(top)): path.lstat() for path in found}
    listed = machine.run(f'"{python}" -m pip list --format freeze', machine.folder)
    return {name: (at.st_size, at.st_mtime_ns) for name, at in files.items()} | {"packages": listed}
