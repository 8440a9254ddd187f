"""The record of digests: every case of a run is in it, and no difference between two goes unsaid."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "frame_digests.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("frame_digests", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_published_shapes_are_known(tool):
    """Those of SeedVR2 and of both Wans, the latter with their published numbers of parameters."""
    count = {family: sum(map(math.prod, tool.shapes(family).values())) for family in tool.FAMILIES}
    assert count == {"seedvr2": 250_648_227, "wan2.1": 126_892_531, "wan2.2": 704_688_668}


def test_a_run_and_its_comparison(tool, tmp_path, capsys):
    """The demo VAE in fp32, here rather than in processes of its own: the same bits twice, and every change is seen."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    arguments = ["--small", "--cell", "demo", "fp32"]
    assert tool.main([str(old), *arguments]) == 0
    assert tool.main([str(new), *arguments, "--compare", str(old)]) == 0
    record = json.loads(old.read_text())
    assert len(record) == 6 and len({each["digest"] for each in record.values()}) == 6
    assert all(each["peak"] > 0 for each in record.values())
    capsys.readouterr()
    bits, peak, gone, kept = list(record)[:4]
    record[bits]["digest"], record[peak]["peak"] = "0" * 64, 17
    record["another"] = record.pop(gone)
    old.write_text(json.dumps(record))
    assert tool.main([str(new), *arguments, "--compare", str(old)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and not any(kept in line for line in lines)
    for line, said in zip(sorted(lines), sorted((f"{bits}: other bits", f"{peak}: other peak (17 ->",
                                                 f"{gone}: only in the new", "another: only in the old")),
                          strict=True):  # fmt: skip
        assert line.startswith(said)
