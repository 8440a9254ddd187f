"""One device and several: both run, their frames are compared, and the line says what was measured."""

import json

import pytest


@pytest.fixture
def tool(load_measuring):
    return load_measuring("measure_devices")


def test_two_devices(tool, tmp_path, capsys):
    """Compare two devices with one."""
    file = tmp_path / "d.json"
    asked = ["--cpu", "--sizes", "32x16", "--frames", "9", "17", "--counts", "2", "3", "--runs", "1"]
    assert tool.main([*asked, "--json", str(file)]) == 0
    short, _, long, three = map(json.loads, file.read_text().splitlines())
    assert three["devices"] == 3 and three["equal"] and three["ms_a_frame"]["one"] == long["ms_a_frame"]["one"]
    assert (short["frames"], long["frames"], long["devices"], long["split"]) == (9, 17, 2, "segments")
    assert long["equal"] and long["ms_a_frame"]["several"] > 0 and 1 <= short["computed"] <= long["computed"] < 2
    assert "bits equal" in capsys.readouterr().out


def test_other_bits(tool, monkeypatch):
    """Other bits are an error."""
    found = {"equal": False, "ms_a_frame": {"one": 1.0, "several": 1.0}, "spread": {"one": [1, 1], "several": [1, 1]},
             "speedup": 1.0, "stated_gb": {}, "reserved_gb": {}}  # fmt: skip
    monkeypatch.setattr(tool, "measured", lambda _, z, ways, *rest: dict.fromkeys(ways, found))
    assert tool.main(["--cpu", "--sizes", "32x16", "--frames", "9"]) == 1
