"""What the measurement beside another model says of its figures."""

from __future__ import annotations

import pytest


@pytest.fixture
def tool(load_tool):
    pytest.importorskip("gguf")  # of the tests in tests/host, which start ComfyUI
    return load_tool("measure_beside")


def figures(decode, after, kept, peak=3.0):
    return {"decode": decode, "next": after, "whole": decode + after, "again": 0.1, "had": 12.0, "kept": kept,
            "peak": peak, "notes": [f"beside Heavy ({kept} GB stay)"]}  # fmt: skip


def test_what_must_hold_is_said(tool):
    found = {"ComfyUI": figures(5.0, 2.0, 0.0), "never": figures(2.0, 1.0, 4.0), "always": figures(2.5, 0.1, 12.0),
             "auto": figures(2.5, 0.12, 12.0)}  # fmt: skip
    lines = "\n".join(tool.told(found, 16.0, 12))
    assert "FAILS" not in lines and "holds: always keeps 12.0 of at most 12.0 GB" in lines
    assert "begins 1.88 s sooner" in lines and "beside Heavy (12.0 GB stay)" in lines
    found["always"]["kept"], found["auto"]["whole"] = 9.0, 2.9
    lines = "\n".join(tool.told(found, 16.0, 12))
    assert "FAILS: always keeps 9.0" in lines and "FAILS: auto takes +11.5 %" in lines


def test_a_failed_run_is_told(tool):
    lines = tool.told({"ComfyUI": {"error": "no network"}, "as it is": figures(2.0, 1.0, 4.0)}, 16.0, 12)
    assert len(lines) == 2 and "no network" in lines[0]
