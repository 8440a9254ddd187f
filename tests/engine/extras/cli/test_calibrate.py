"""`calibrate`: tables that 8-bit runs find, and what it refuses."""

import json
from pathlib import Path

import pytest
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.latents import write_latent
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.loader import load


@pytest.fixture
def wide(make_vae_file, monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return make_vae_file((16, 16, 16, 32), (16, 16, 16, 32), 4, 6)


def test_clip_calibrates_both_halves(wide, noise, capsys):
    write_mp4("clip.mp4", (noise(5, 32, 32, 3) * 60 + 128).clamp(0, 255).byte(), 24)
    assert main(["calibrate", str(wide), "--clip", "clip.mp4", "--table", "t.json", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "from clip.mp4" in out
    assert "all in int8" in out
    for half in ("encoder", "decoder"):
        table = load(wide, device="cpu").store.table(half)
        assert table.source == "clip.mp4"
        assert set(table.errors) == {"fp8", "int8"}
        assert all(0 < error < 1 for error in table.errors["fp8"].values())
    assert set(json.loads(Path("t.json").read_text())["halves"]) == {"encoder", "decoder"}
    assert main(["info", str(wide)]) == 0
    assert "costliest alone in fp8" in capsys.readouterr().out


def test_latent_calibrates_the_decoder(wide, noise, capsys):
    write_latent("l.safetensors", noise(1, 16, 2, 4, 4), {})
    assert main(["calibrate", str(wide), "--latent", "l.safetensors", "--ranges-only", "--device", "cpu"]) == 0
    assert load(wide, device="cpu").store.table("encoder") is None
    assert not load(wide, device="cpu").store.table("decoder").errors
    found = load(wide, device="cpu").store.table("decoder").ranges["decoder.mid_block.resnets.0.conv1"]
    assert all(0 < rms < largest for rms, largest in zip(found.rms, found.largest, strict=True))
    assert main(["calibrate", str(wide), "--table", "t.txt"]) == 2
    assert "ends in .json" in capsys.readouterr().err
