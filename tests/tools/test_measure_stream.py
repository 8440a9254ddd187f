"""A long clip as a stream beside a decode: all parts run and say what they took."""

import re

import pytest


@pytest.fixture
def tool(load_measuring):
    return load_measuring("measure_stream")


def test_stream(tool, tmp_path, capsys):
    """Compare a stream with a decode."""
    file = tmp_path / "a.mp4"
    asked = ["--size", "32x16", "--frames", "17", "--decode", "5", "--runs", "1", "--device", "cpu"]
    assert tool.main(asked) == 0
    said = capsys.readouterr().out
    assert re.search(r"decode of 5 frames: [\d.]+ \([\d.]+ to [\d.]+\) ms", said)
    assert re.search(r"stream of 17 frames: .* at frame 17", said)
    assert tool.main([*asked, "--mp4", str(file)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"MP4 of 17 frames: .*\n.*a\.mp4: [\d.]+ MiB", said) and file.is_file()


def test_latents(tool, noise):
    """Latents change slowly."""
    few = noise(1, 4, 3, 2, 5)
    many = tool.slow(few, 9)
    assert many.shape == (1, 4, 9, 2, 5)
    assert (many[:, :, ::4] - few).abs().max() < 1e-6 and (many.diff(dim=2).abs() <= few.diff(dim=2).abs().max()).all()
