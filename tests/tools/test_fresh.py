"""From a clean clone to a running program: what an interrupted run leaves."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("options", [["--without-pip"], []])
def test_an_environment_without_pip_is_made_anew(load_tool, tmp_path, monkeypatch, options):
    """Making one ends with pip, which takes seconds."""
    tool, venv = load_tool("fresh"), tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", *options, str(venv)], check=True)
    done = []
    monkeypatch.setattr(tool.subprocess, "run", lambda command, **_: done.append(list(map(str, command))))
    tool.prepare(venv, plain=False)
    assert (done[0] == [sys.executable, "-m", "venv", str(venv)]) == bool(options)
    assert done[-1][1:4] == ["-m", "pip", "install"]
