"""Profiles on the CPU: operator calls are found, counted and timed; speed limits only where ceilings were measured."""

import json

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.extras.bench.profile import BETWEEN, profile
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.kernels.conv3d import conv3d, pack_weight
from zerowaste_vae.engine.kernels.norm_act import Norm, norm_act
from zerowaste_vae.engine.kernels.observe import watching
from zerowaste_vae.engine.options import DEFAULTS

#: Whose kernels its test on a GPU takes.
WARM = ("seedvr2",)


def test_watching():
    """A watch sees outermost calls, until it ends."""
    x, buffer = torch.randn(1, 3, 4, 8), torch.empty(1, 5, 6, 8)
    seen = []

    def watch(operator, args, kwargs, call):
        seen.append((operator, kwargs))
        return call()

    with watching(watch):
        norm_act(x, Norm(groups=4), buffer, slot=0)  # calls statistics and coefficients itself
    norm_act(x, Norm(groups=4), buffer)
    assert seen == [("norm_act", {"slot": 0})]


def test_watch_fails():
    """A watch that fails is removed."""
    def watch(*_):
        raise RuntimeError("no")

    x, out = torch.randn(3, 5, 6, 8), torch.empty(1, 3, 4, 8)
    weight = pack_weight(torch.randn(8, 8, 3, 3, 3), torch.float32)
    with pytest.raises(RuntimeError), watching(watch):
        conv3d(x, weight, out)
    conv3d(x, weight, out)


@pytest.mark.parametrize("half", ["decode", "encode"])
def test_rows_add_up(vae, half):
    """Times of rows add up to the total."""
    data = torch.randn(1, 16, 2, 2, 3) if half == "decode" else torch.rand(5, 16, 24, 3)
    found = profile(vae, half, data, runs=2)
    assert found.frames == 10 and not found.rates
    assert sum(r.ms for r in found.rows) == pytest.approx(found.total_ms)
    assert found.total_ms <= found.call_ms
    assert {r.operator for r in found.rows} >= {"conv3d", "norm_act", "coefficients", "attention", BETWEEN}
    assert all(r.floor_ms is None for r in found.rows)
    assert [s["name"] for s in found.stages()] == ["1x", "2x", "4x", "8x", BETWEEN]
    assert len(found.lines()) == len(found.rows) + 3
    json.dumps(found.record())


def test_flop(vae):
    """A clip's 8x frames 0 and 1 have one and two taps in time of three."""
    found = profile(vae, "decode", torch.randn(1, 16, 2, 1, 1), runs=1)
    rows = [r for r in found.rows if r.stage == "8x" and r.what.startswith("8->8") and r.operator == "conv3d"]
    assert {r.what[5:10] for r in rows} >= {"3x3x3", "2x3x3", "1x3x3"}
    assert sum(r.flop for r in rows) == pytest.approx(5 * 64 * 2 * 27 * 8 * 8 * (1 / 3 + 2 / 3 + 3))


def test_operators_without_a_description(shared, monkeypatch):
    """They have their time and the bytes that they are given, as Mage-VAE's passes."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    vae = load(shared / "golden" / "mage" / "mage.weights.safetensors", device="cpu").with_options(DEFAULTS)
    rows = profile(vae, "decode", torch.randn(1, vae.latent_channels, 1, 2, 3), 1).rows
    mixed = [row for row in rows if row.operator == "mixed"]
    assert sum(row.calls for row in mixed) == vae.model.config.blocks and mixed[0].stage == "1x"
    assert {"windowed", "gates"} < {row.operator for row in rows}
    assert all(row.moved > 0 for row in rows if row.operator != BETWEEN)


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "decode", "--size", "16x16", "--frames", "1", "--runs", "1", "--device", "cpu",
                 "--json", "p.json"]) == 0  # fmt: skip
    assert "to_pixels" in capsys.readouterr().out
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["stages"][0]["floor_ms"] is None and record["rows"]


@pytest.mark.parametrize(("args", "word"), [(["--frames", "6"], "4n+1"), (["--runs", "0"], "at least 1"),
                                            (["--size", "15x16"], "multiples of 8")])  # fmt: skip
def test_wrong_options(capsys, args, word):
    assert main(["profile", "decode", "--device", "cpu", *args]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_speed_limits_gpu(tmp_path, capsys):
    """On a GPU rows have speed limits."""
    assert main(["profile", "encode", "--size", "256x128", "--frames", "5", "--json", str(tmp_path / "p.json")]) == 0
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["rates"]["fp16"] > 0 and record["rates"]["copy"] > 0
    assert all(r["floor_ms"] > 0 for r in record["rows"] if r["operator"] == "conv3d")
