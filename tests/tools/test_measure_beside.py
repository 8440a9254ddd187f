"""What the measurement beside another model says of its figures."""

from __future__ import annotations

import pytest


@pytest.fixture
def tool(load_tool):
    pytest.importorskip("gguf")  # of the tests in tests/host, which start ComfyUI
    return load_tool("measure_beside")


def figures(decode, after, kept, peak=3.0, run=1.0, chunk=4):
    return {"decode": decode, "next": after, "whole": decode + after, "again": 0.1, "had": 12.0, "kept": kept,
            "peak": peak, "run": run, "plan": {"chunk_latents": chunk}, "events": {"oom_step_downs": 0},
            "notes": [f"beside Heavy ({kept} GB stay)"]}  # fmt: skip


@pytest.fixture
def found():
    return {"ComfyUI": figures(5.0, 2.0, 0.0), "never": figures(2.0, 1.0, 4.0), "always": figures(2.5, 0.1, 12.0),
            "auto": figures(2.5, 0.12, 12.0), "alone": figures(2.4, 0.0, 0.0, run=0.98)}  # fmt: skip


def test_what_must_hold_is_said(tool, found):
    lines = tool.told(found, tool.KEEP, 16.0, 12, 12e9)
    assert lines[0] == "  holds: always keeps 12.0 of at most 12.0 GB" and "holds: auto takes +0.8 %" in lines[1]
    found["always"]["kept"], found["auto"]["whole"] = 9.0, 2.9
    lines = tool.told(found, tool.KEEP, 16.0, 12, 12e9)
    assert "FAILS: always keeps 9.0" in lines[0] and "FAILS: auto takes +11.5 %" in lines[1]


@pytest.mark.parametrize(("way", "least"), [("ComfyUI", 1.07), ("as it is", 0.86)])
def test_the_way_back_is_saved(tool, found, way, least):
    """12 GB (2^30 bytes) at 12e9 bytes a second: all of it beside ComfyUI's decode, 80 % beside another checkout's."""
    found[way] = found["ComfyUI"]
    ways = (way,) if way == tool.STOCK else tool.KEEP
    line = tool.told(found, ways, 16.0, 12, 12e9)[-1]
    assert "holds" in line and "done 1.88 s sooner" in line and f"at least {least} asked" in line
    found[way]["next"] = 0.9
    assert "FAILS" in tool.told(found, ways, 16.0, 12, 12e9)[-1]


def test_a_run_is_compared_with_its_plan_without_the_model(tool, found):
    (line,) = tool.told(found, (tool.ALONE,), 16.0, 12, 12e9)
    assert "holds: auto's run takes +2.0 % of the same plan's" in line
    found["alone"] = figures(2.4, 0.0, 0.0, run=0.9, chunk=8)
    (line,) = tool.told(found, (tool.ALONE,), 16.0, 12, 12e9)
    assert "FAILS: auto's run takes +11.1 % of another plan's" in line


def test_a_failed_run_is_told(tool):
    failed = {"error": "no network"}
    assert "no network" in tool.line("ComfyUI", failed)
    assert tool.told({"ComfyUI": failed, "as it is": figures(2.0, 1.0, 4.0)}, (tool.STOCK,), 16.0, 12, 12e9) == []


def test_a_line_has_all_figures(tool, found):
    found["auto"]["events"]["oom_step_downs"] = 1
    line = tool.line("auto", found["auto"])
    assert "decode 2.50 s, run 1.00 s, next 0.12 s, whole 2.62 s, again 0.10 s; 12.0 GB of the model before" in line
    assert "beside Heavy (12.0 GB stay); stated 3.00 GB; oom_step_downs 1" in line
