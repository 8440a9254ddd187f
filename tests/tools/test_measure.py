"""tools/measure.py: every comparison runs, and its line says what was measured."""

import re

import pytest
import torch
from zerowaste_vae import demo_vae_path, read_checkpoint

SPREAD = r"[\d.]+ \([\d.]+ to [\d.]+\)"


@pytest.fixture
def tool(load_tool, monkeypatch):
    """The script, whose random weights are the demo VAE's."""
    made = load_tool("measure")
    monkeypatch.setattr(made, "random_checkpoint", lambda architecture: read_checkpoint(demo_vae_path()))
    return made


@pytest.fixture
def measured(tool, capsys):
    """measured(arguments): the exit code and the lines printed, on a CPU with frames of 32x16."""

    def run(*arguments):
        code = tool.main([*arguments, "--sizes", "32x16", "--device", "cpu"])
        return code, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("half", [[], ["--encode"]])
def test_toggle(measured, half):
    """Compare an optimisation off and on."""
    asked = ["toggle", "flash_attention", "--frames", "5", "--precisions", "fp32", "--runs", "2", *half]
    code, (said,) = measured(*asked)
    times = rf"{SPREAD}, memory not measured .*stated\), (inf|[\d.]+) dB"
    assert code == 0 and re.fullmatch(
        rf"seedvr2 {'encode' if half else 'decode'} fp32 32x16 x 5, ms a frame, flash_attention "
        rf"off {times}; on {times}: [\d.]+ of the time", said)  # fmt: skip


def test_changes(measured):
    """The look for changed weights, of each half."""
    code, lines = measured("changes", "--precisions", "fp16", "--runs", "2")
    assert code == 0 and len(lines) == 2
    for half, said in zip(("encoder", "decoder"), lines, strict=True):
        assert re.fullmatch(rf"seedvr2 {half} fp16, \d+ MB on cpu, ms a call: {SPREAD}", said)


def test_decibel(tool):
    exact = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert tool.decibel(exact + 0.1, exact, False) == pytest.approx(20, abs=1e-4)
    assert tool.decibel(exact + 0.1, exact, True) == pytest.approx(20 + 10 * 0.22185, abs=1e-3)


def test_devices(measured):
    """Compare two and three devices with one; longer clips gain more."""
    code, lines = measured("devices", "--frames", "9", "17", "--counts", "2", "3", "--runs", "1")
    line = rf"seedvr2 decode auto 32x16 x (\d+): (\d) devices by segments {SPREAD} ms a frame, one {SPREAD}: "
    found = [re.match(rf"{line}[\d.]+ times, computed ([\d.]+); .*bits equal$", said).groups() for said in lines]
    assert code == 0 and [each[:2] for each in found] == [("9", "2"), ("9", "3"), ("17", "2"), ("17", "3")]
    assert 1 <= float(found[0][2]) <= float(found[2][2]) < 2


def test_other_bits(tool, measured, monkeypatch):
    """Other bits are an error."""
    monkeypatch.setattr(tool.torch, "equal", lambda *_: False)
    code, (said,) = measured("devices", "--frames", "9", "--runs", "1")
    assert code == 1 and said.endswith("bits DIFFER")


def test_stream(measured, tmp_path):
    """Compare a stream, to nothing and to a file, with a decode."""
    asked = ["stream", "--frames", "17", "--decode", "5", "--runs", "1"]
    code, (decode, stream) = measured(*asked)
    assert code == 0 and re.search(rf"decode of 5 frames: {SPREAD} ms a frame$", decode)
    assert re.match(r"stream of 17 frames: [\d.]+ ms a frame; .* at frame 17", stream)
    file = tmp_path / "a.mp4"
    code, (_, stream) = measured(*asked, "--mp4", str(file))
    assert code == 0 and re.match(r".*a\.mp4, [\d.]+ MiB: stream of 17 frames: .* for the encoder; ", stream)
    assert file.is_file()


def test_latents(tool, noise):
    """Latents change slowly."""
    few = noise(1, 4, 3, 2, 5)
    many = tool.slow(few, 9)
    assert many.shape == (1, 4, 9, 2, 5)
    assert (many[:, :, ::4] - few).abs().max() < 1e-6 and (many.diff(dim=2).abs() <= few.diff(dim=2).abs().max()).all()


def test_decoders(tool, measured, monkeypatch):
    """Each decoder that a family has published."""
    monkeypatch.setattr(tool, "random_checkpoint", lambda *_, **__: read_checkpoint(demo_vae_path()))
    code, lines = measured("decoders", "--frames", "5", "--runs", "1")
    line = rf"seedvr2 decode auto 32x16 x 5, published, tiles family: {SPREAD} ms a frame, .* stated\); plain torch.*"
    assert code == 0 and len(lines) == 1 and re.fullmatch(line, lines[0])
