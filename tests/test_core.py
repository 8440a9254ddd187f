"""tests/core.txt, which README's command runs: what it names is there, it is large enough, and no room is without."""

import importlib.util
import re
import subprocess
import sys

import pytest

from .conftest import ROOT, core_tests, is_core
from .test_structure import FILES


def test_what_it_names_is_there():
    for file, named in core_tests().items():
        there = set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.M))
        assert {name.removeprefix("-") for name in named} <= there, file
        assert len({name.startswith("-") for name in named}) < 2, f"{file}: tests of the core, or those that are not"
        assert any(is_core(named, test) for test in there), file


def rooms(files, below):
    """Folders of the engine, and of its extras."""
    parents = [path.relative_to(below).parent.parts for path in files if path.is_relative_to(below)]
    return {parts[: 1 + (parts[0] == "extras")] for parts in parents if parts not in ((), ("extras",))}


def test_every_room_is_in_it():
    there = rooms(FILES, ROOT / "engine")
    assert len(there) > 15
    doors = {("files",), ("compat",)}  # to folders of the extras
    assert there - doors == rooms([ROOT / file for file in core_tests()], ROOT / "tests" / "engine")


def test_names():
    """Of test_b: where none is named, another, it, and all but it."""
    assert [is_core(n, "test_b") for n in ([], ["test_a"], ["test_b"], ["-test_b"])] == [True, False, True, False]
    assert not is_core(None, "test_b")


@pytest.mark.parametrize(("given", "asked"), [([], ["-m", "core"]), (["tests"], ["tests"])])
def test_the_command_asks_for_it(monkeypatch, given, asked):
    spec = importlib.util.spec_from_file_location("fresh", ROOT / "tools" / "fresh.py")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    ran = []
    monkeypatch.setattr(fresh, "prepare", lambda *_: "python")
    monkeypatch.setattr(fresh.subprocess, "call", lambda command, **_: ran.extend(command) or 0)
    monkeypatch.setattr(sys, "argv", ["fresh.py", "test", *given])
    assert fresh.main() == 0
    assert ran[ran.index("worksteal") + 1 :] == asked


def test_the_core_is_large_enough():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "core", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]
    assert set(found) == set(core_tests())
    assert len(found) > 600
