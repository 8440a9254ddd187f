"""ComfyUI hosts for the tests.

COMFYUI_DIR names a checkout and COMFY_VENV the virtual environment with its requirements; by default they are
~/.cache/zerowaste-vae/ComfyUI and ~/.cache/zerowaste-vae/venv (tools/host_ci.sh makes both). A host from before the
native SeedVR2 VAE is looked for in COMFYUI_OLD_DIR and COMFY_OLD_VENV, else there as ComfyUI-0.3.64 and venv-0.3.64.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# `import running` from the tests of this folder.
sys.path.insert(0, str(Path(__file__).parent))

import running


@pytest.fixture(scope="session")
def random_weights():
    return running.random_weights


@pytest.fixture(scope="session")
def host_places() -> tuple[Path, Path]:
    """(checkout, virtual environment) of the newest host."""
    return running.newest()


@pytest.fixture(scope="session")
def newer_places(tmp_path_factory) -> tuple[Path, Path]:
    """The same of a host newer than the newest, as far as its files could be read (newer_host.py)."""
    return running.newer(tmp_path_factory.mktemp("newer"))


@pytest.fixture
def pack_folder(tmp_path) -> Path:
    """A folder from which the pack is importable as zerowaste_vae."""
    (tmp_path / "zerowaste_vae").symlink_to(running.REPOSITORY, target_is_directory=True)
    return tmp_path


@pytest.fixture(scope="session")
def comfy(tmp_path_factory, host_places):
    with running.serving(tmp_path_factory.mktemp("comfy"), host_places) as server:
        yield server


@pytest.fixture(scope="session")
def old_comfy(tmp_path_factory):
    with running.serving(tmp_path_factory.mktemp("old_comfy"), running.oldest()) as server:
        yield server
