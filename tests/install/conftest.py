"""The repository to clone, the archive to unpack, and what a machine needs to follow docs/install.md."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from .machine import FIRST, ROOT, SECOND, Machine


@pytest.fixture(scope="session")
def followed():
    """Whether the page is followed here."""
    if not os.environ.get("ZEROWASTE_INSTALL"):
        pytest.skip("docs/install.md is followed with ZEROWASTE_INSTALL=1, as .ci/run does: a minute or two")
    if os.name == "nt":
        pytest.skip("the pages are followed on Linux, those of Windows by a Python like the portable version's")
    for name in ("pip", "setuptools", "ensurepip"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not in this Python, and packages are installed without a network")
    if shutil.which("git") is None or subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("this copy of the repository is not under git, which knows its files")


def commit(folder, message):
    who = ("-c", "user.name=A user", "-c", "user.email=user@localhost", "-c", "core.compression=0")
    for command in (("add", "-A"), ("commit", "-q", "-m", message)):
        subprocess.run(["git", *who, *command], cwd=folder, check=True)


@pytest.fixture
def place(followed, tmp_path):
    """Where a machine is put: 100 MB and more, which are not kept."""
    yield tmp_path / "我的 AI 工具"
    shutil.rmtree(tmp_path)


@pytest.fixture
def repository(place):
    """What URL_OF_THIS_REPOSITORY stands for: this working tree as a repository's one commit."""
    folder = place.parent / "repository"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q", "-b", "main", folder], check=True)
    commit(folder, "First")
    return folder


@pytest.fixture
def release():
    """release(folder) gives the files of a folder the next version, with times of years ago, as archives have."""

    def change(folder):
        for name in ("__init__.py", "pyproject.toml"):
            text = (folder / name).read_text(encoding="utf-8")
            first, second = (f'"{said.split()[1]}"' for said in (FIRST, SECOND))
            assert text.count(first) == 1
            (folder / name).write_text(text.replace(first, second), encoding="utf-8")
            os.utime(folder / name, (1_600_000_000, 1_600_000_000))

    return change


@pytest.fixture(scope="session")
def archive(followed, tmp_path_factory):
    """The archive of the registry."""
    folder = tmp_path_factory.mktemp("archive")
    command = [sys.executable, ROOT / "tools" / "build_archive.py", "--out", folder]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "zerowaste-vae.zip"


@pytest.fixture
def unpack(archive):
    def unpack(folder):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)

    return unpack


@pytest.fixture
def machine(place):
    return Machine(place)
