"""One toggle off and on: both run in turns, and the line says what was measured."""

import re

import pytest
import torch


@pytest.fixture
def tool(load_measuring):
    return load_measuring("measure_toggle")


@pytest.mark.parametrize("half", [[], ["--encode"]])
def test_off_and_on(tool, capsys, half):
    asked = ["flash_attention", "--sizes", "32x16", "--frames", "5", "--precisions", "fp32", "--runs", "2",
             "--db-frames", "5", "--device", "cpu", *half]  # fmt: skip
    assert tool.main(asked) == 0
    (said,) = capsys.readouterr().out.splitlines()
    times = r"[\d.]+ \([\d.]+ to [\d.]+\), memory not measured .*stated\), (inf|[\d.]+) dB"
    assert re.fullmatch(rf"seedvr2 {'encode' if half else 'decode'} fp32 32x16 x 5, ms a frame, flash_attention "
                        rf"off {times}; on {times}: [\d.]+ of the time", said)  # fmt: skip


def test_decibel(tool):
    exact = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert tool.decibel(exact + 0.1, exact, False) == pytest.approx(20, abs=1e-4)
    assert tool.decibel(exact + 0.1, exact, True) == pytest.approx(20 + 10 * 0.22185, abs=1e-3)
