"""Two checkouts in one process: both run, and the line says which is slower."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool(load_tool):
    return load_tool("compare_speed")


def test_same_checkout(tool, tmp_path, capsys):
    """Compare a checkout with itself."""
    assert tool.main([str(ROOT), "--small", "--runs", "1", "--json", str(tmp_path / "t.json")]) == 0
    found = json.loads((tmp_path / "t.json").read_text())
    assert len(found) == 2 and all(set(each) == {"this", "other"} for each in found.values())
    assert all(t["median"] > 0 and t["runs"] == 1 for each in found.values() for t in each.values())
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert sys.modules["other_vae"].load is not sys.modules["zerowaste_vae"].load


def test_line(tool):
    """The line says which is slower."""
    ours = {"median": 10.2, "low": 10.0, "high": 10.4}
    theirs = {"median": 10.0, "low": 9.0, "high": 11.0}
    said = tool.line("seedvr2 fp16 decode", {"this": ours, "other": theirs})
    assert said.endswith("this 10.20 (10.00 to 10.40), other 10.00 (9.00 to 11.00) ms/frame, +2.0 %")
    said = tool.line("seedvr2 fp16 decode", {"this": {**ours, "first": 1234.0}, "other": {**theirs, "first": 1100.0}})
    assert said.endswith("ms/frame, +2.0 %; the first call this 1234, other 1100")


def test_first_calls(tool, monkeypatch):
    """First calls come from processes of their own."""
    class Done:
        returncode, stderr = 0, ""

        def __init__(self, stdout):
            self.stdout = stdout

    monkeypatch.setattr(tool.subprocess, "run", lambda command, **_: Done(f"a warning\n{command[-3]}.5\n"))
    assert tool.warm(ROOT, [(str(i), "this", "file") for i in range(3)]) == [0.5, 1.5, 2.5]


def test_no_checkout(tool, tmp_path, capsys):
    """A folder that is no checkout is refused."""
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path), "--small"])
    assert "no checkout of this pack" in capsys.readouterr().err
