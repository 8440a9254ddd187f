"""Two checkouts in one process: both run, and the line says which is slower."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool(load_tool):
    return load_tool("compare_speed")


def test_a_checkout_beside_itself(tool, tmp_path, capsys):
    assert tool.main([str(ROOT), "--small", "--runs", "1", "--json", str(tmp_path / "t.json")]) == 0
    found = json.loads((tmp_path / "t.json").read_text())
    assert len(found) == 2 and all(set(each) == {"this", "other"} for each in found.values())
    assert all(t["median"] > 0 and t["runs"] == 1 for each in found.values() for t in each.values())
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert sys.modules["other_vae"].load is not sys.modules["zerowaste_vae"].load


def test_the_line(tool):
    ours = {"median": 10.2, "min": 10.0, "max": 10.4}
    theirs = {"median": 10.0, "min": 9.0, "max": 11.0}
    said = tool.line("seedvr2 fp16 decode", {"this": ours, "other": theirs})
    assert said.endswith("this 10.20 (10.00 to 10.40), other 10.00 (9.00 to 11.00) ms/frame, +2.0 %")
    said = tool.line("seedvr2 fp16 decode", {"this": {**ours, "first": 1234.0}, "other": {**theirs, "first": 1100.0}})
    assert said.endswith("ms/frame, +2.0 %; the first call this 1234, other 1100")


def test_first_calls_come_from_processes_of_their_own(tool, monkeypatch):
    class Done:
        returncode, stderr = 0, ""

        def __init__(self, stdout):
            self.stdout = stdout

    monkeypatch.setattr(tool.subprocess, "run", lambda command, **_: Done(f"a warning\n{command[-3]}.5\n"))
    assert tool.warm(ROOT, [(str(i), "this", "file") for i in range(3)]) == [0.5, 1.5, 2.5]


def test_what_is_no_checkout_is_refused(tool, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path), "--small"])
    assert "no checkout of this pack" in capsys.readouterr().err
