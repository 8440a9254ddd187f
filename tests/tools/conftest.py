"""Fixtures of tests of tools."""

import importlib.util
from pathlib import Path

import pytest
from zerowaste_vae import demo_vae_path, read_checkpoint

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="session")
def load_tool():
    """load_tool(name): that script as a module; what it imports is looked for beside it."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield load


@pytest.fixture
def load_measuring(load_tool, monkeypatch):
    """load_measuring(name): that script, whose random weights are the demo VAE's."""

    def load(name):
        made = load_tool(name)
        monkeypatch.setattr(made, "random_checkpoint", lambda architecture: read_checkpoint(demo_vae_path()))
        return made

    return load
