"""Say the cure if Triton is missing or fails, on Windows above all; tests/engine/kernels/test_probe.py has Linux."""

import sys

import pytest
from zerowaste_vae.engine.kernels import cure as words


@pytest.mark.parametrize(("torch", "line"), [
    ("2.6.0+cu124", 'pip install "triton-windows<3.3"'), ("2.7.1+cu128", 'pip install "triton-windows<3.4"'),
    ("2.8.0+cu128", 'pip install "triton-windows<3.5"'), ("2.9.1+cu130", 'pip install "triton-windows<3.6"'),
    ("2.10.0+cu130", 'pip install "triton-windows<3.7"'), ("2.11.0+cu130", 'pip install "triton-windows<3.7"'),
    ("2.13.0+cu130", 'pip install "triton-windows<3.8"'), ("2.12.0+cu130", "pip install triton-windows"),
    ("3.0", "pip install triton-windows"), ("", "pip install triton-windows"), ("2.x", "pip install triton-windows"),
])  # fmt: skip
def test_windows_versions(torch, line):
    """The line for windows is capped where the pair is known."""
    assert words.install(torch, "win32") == line
    assert words.install(torch, "linux") == "pip install triton"


def test_windows_line(monkeypatch):
    """Windows is told the line and others the fact."""
    monkeypatch.setattr(words, "version", lambda name: "2.11.0+cu130")
    assert words.not_installed("win32") == 'Triton is not installed (pip install "triton-windows<3.7")'
    assert words.not_installed("linux") == "Triton is not installed"


@pytest.fixture
def embedded(monkeypatch, tmp_path):
    """A Python on Windows whose folders a test makes."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(words.sysconfig, "get_paths", lambda **_: {"include": str(tmp_path / "Include")})
    monkeypatch.setattr(words.sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(words.shutil, "which", lambda name: None)  # there is no compiler
    monkeypatch.setattr(words, "version", lambda name: "2.9.1+cu130")
    return tmp_path


def test_embedded_python(embedded, monkeypatch):
    """An embedded python needs its folders and no compiler."""
    said = words.cure("win32")
    assert str(embedded / "Include") in said and str(embedded / "libs") in said
    assert f"Python {'.'.join(map(str, sys.version_info[:3]))}, exactly this version" in said
    (embedded / "Include").mkdir()
    said = words.cure("win32")
    assert f"Triton needs {embedded / 'libs'}," in said
    (embedded / "libs").mkdir()
    assert words.cure("win32") == 'triton-windows has to be of torch\'s own release: pip install "triton-windows<3.6"'
    for name in ("gcc", "clang", "python3-dev"):
        assert name not in said and name not in words.cure("win32")
    monkeypatch.setenv("CC", "cl")
    assert words.cure("win32") == "CC names cl, which is no program: let it name a C compiler, or unset it"
    monkeypatch.setattr(words.shutil, "which", lambda name: name)
    assert words.cure("win32") == "Triton compiles with CC=cl: unset it, triton-windows brings a compiler of its own"
