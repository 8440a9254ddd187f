"""tools/measure_packs.py: its lines, what must hold, and what it needs."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import InputError


@pytest.fixture
def tool(load_tool, tmp_path, monkeypatch):
    made = load_tool("measure_packs")
    made.out = tmp_path / "out.json"
    for variable in ("SEEDVR2_PACK", "WANVIDEO_PACK"):
        monkeypatch.delenv(variable, raising=False)
    return made


def test_diffusers_beside_ours(tool, capsys):
    """Both in turn on a CPU, where they agree and nothing must hold."""
    pytest.importorskip("diffusers")
    asked = ["--cases", "flux", "--small", "--size", "16x16", "--runs", "1", "--device", "cpu"]
    assert tool.main(["diffusers", str(tool.out), *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    name = "AutoencoderKL 16x16 x 1"
    assert [line.partition(": ")[0] for line in lines] == [f"{name}, {who}" for who in ("diffusers", "ours", "both")]
    assert "memory not measured (0." in lines[1] and float(re.search(r"([\d.]+|inf) dB", lines[2])[1]) > 100
    found = json.loads(tool.out.read_text())["cases"][name]
    assert found["ours"]["runs"] == 1 and found["both"]["db"] > 100 and "trace" not in found["ours"]


@pytest.mark.parametrize("what", ["wanvideo", "seedvr2"])
def test_a_checkout_is_asked_for(tool, what):
    with pytest.raises(InputError, match="_PACK names no checkout"):
        tool.main([what, str(tool.out), "--device", "cpu"])


@pytest.mark.parametrize(("reserved", "tiles", "code"), [(4.05, 1, 0), (4.4, 1, 1), (4.05, 2, 1)])
def test_what_must_hold_on_a_gpu(tool, monkeypatch, capsys, reserved, tiles, code):
    """Memory as stated beside what was held, under the limit, and whole frames."""
    monkeypatch.setattr(tool, "environment", lambda device: {})
    asked = SimpleNamespace(device="cuda", ours=False, small=False, vram_gb=8.0, out=tool.out)
    m = tool.Measurement(asked)
    asked.measure = lambda m: tool.checked(
        m, {"reserved_gb": reserved, "stated_gb": 3.0, "held_gb": 1.0}, [SimpleNamespace(grid=[0] * tiles)]
    )
    assert m.run() == code and ("FAILS" in capsys.readouterr().out) == bool(code)


def test_decibel_of_shorter_clips(tool):
    exact = torch.zeros(2, 3)
    assert tool.decibel(torch.full((4, 3), 0.02), exact) == pytest.approx(40, abs=1e-4)
