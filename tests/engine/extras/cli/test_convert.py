"""`zerowaste-vae convert`: what it prints, verifies, refuses and leaves behind."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import demo_vae_path, read_checkpoint
from zerowaste_vae.engine.extras.cli import main


def test_converts_and_reports(vae_file, tmp_path, capsys):
    out = tmp_path / "vae.gguf"
    assert main(["convert", str(vae_file), str(out), "--type", "q8_0"]) == 0
    text = capsys.readouterr().out
    assert "Q8_0" in text and "relative RMS error" in text and "MiB" in text
    assert read_checkpoint(out).metadata["norm_num_groups"] == "4"
    assert main(["convert", str(out), str(tmp_path / "back.safetensors"), "--type", "F16", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert load_file(tmp_path / "back.safetensors").keys() == load_file(vae_file).keys()


def test_details_name_every_tensor(vae_file, tmp_path, capsys):
    assert main(["convert", str(vae_file), str(tmp_path / "a.gguf"), "--type", "f16", "--details"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in load_file(vae_file):
        assert any(f" {name}: " in line for line in lines), name


@pytest.mark.parametrize("decode_only", [False, True])
def test_verify_prints_a_psnr(make_vae_file, tmp_path, capsys, decode_only, monkeypatch):
    """With an encoder the demo clip's latents are decoded, without one seeded noise; the line says which."""
    from zerowaste_vae.engine.extras.cli import convert

    monkeypatch.setattr(convert, "VERIFY_PIXELS", 32)
    source = make_vae_file()
    if decode_only:
        weights = {n: t for n, t in load_file(source).items() if n.startswith("decoder.")}
        source = tmp_path / "decoder.safetensors"
        save_file(weights, source, {"norm_num_groups": "4"})
    out = tmp_path / "a.gguf"
    assert main(["convert", str(source), str(out), "--type", "q8_0", "--verify"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "dB" in line and ("seeded noise" if decode_only else "demo clip") in line
    psnr = float(line.split(": ")[1].split(" dB")[0])
    assert 20 < psnr < 80
    assert main(["convert", str(source), str(out), "--type", "f32", "--verify", "--force"]) == 0
    assert "inf dB" in capsys.readouterr().out


def test_q8_0_of_the_demo_vae(tmp_path, capsys):
    """The promise for the VAE that ships: at least 45 dB on its own clip, in about 53 % of the size."""
    out = tmp_path / "demo.gguf"
    assert main(["convert", str(demo_vae_path()), str(out), "--type", "q8_0", "--verify"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert float(line.split(": ")[1].split(" dB")[0]) >= 45 and "demo clip" in line
    assert 0.5 < out.stat().st_size / demo_vae_path().stat().st_size < 0.56


def test_verify_checks_output_first(tmp_path, capsys):
    (tmp_path / "broken.safetensors").write_bytes(b"x")
    out = str(tmp_path / "gone" / "a.gguf")
    assert main(["convert", str(tmp_path / "broken.safetensors"), out, "--type", "f16", "--verify"]) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_errors_are_one_line_and_leave_nothing(vae_file, tmp_path, capsys):
    (tmp_path / "there.gguf").write_bytes(b"x")
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    out = str(tmp_path / "out.gguf")
    before = sorted(tmp_path.iterdir())
    for args in (
        [str(vae_file), str(tmp_path / "there.gguf"), "--type", "f16"],
        [str(vae_file), out, "--type", "q3"],
        [str(vae_file), str(tmp_path / "out.safetensors"), "--type", "q4_k"],
        [str(tmp_path / "missing.gguf"), out, "--type", "f16"],
        [str(tmp_path / "there.gguf"), out, "--type", "f16"],
        # Nothing is written when the source cannot be decoded and a verification is asked for.
        [str(tmp_path / "other.safetensors"), out, "--type", "f16", "--verify"],
    ):
        assert main(["convert", *args]) == 2
        captured = capsys.readouterr()
        assert len(captured.err.splitlines()) == 1 and not captured.out
        assert sorted(tmp_path.iterdir()) == before
