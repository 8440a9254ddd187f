"""What an operator waits for follows from the card's products and bandwidth for each processor and clock."""

from contextlib import nullcontext

import pytest
import torch
from zerowaste_vae.engine.extras.bench.profile import BETWEEN, Profile, Row
from zerowaste_vae.engine.extras.bench.ratio.run import Ratio
from zerowaste_vae.engine.extras.bench.ratio.unit import factors
from zerowaste_vae.engine.extras.bench.ratio.waits import limits, lines
from zerowaste_vae.engine.kernels.gpus import RATES, find

GPU = find("RTX 5070 Ti", "--ratio").gpu
OWN = RATES["hopper"]
RATIO = Ratio(GPU, torch.device("cpu"), None, factors(OWN, GPU.products), OWN, 1980.0, 132, None)


def test_factors():
    """A card that is as fast in a kind is not slowed there."""
    assert RATIO.factors == pytest.approx({"f32": 5.32, "f16": 2.66, "s32": 2.66}, abs=0.01)
    assert factors(OWN, RATES["a100"])["f32"] == pytest.approx(1.33, abs=0.01) and factors(OWN, OWN)["s32"] == 1.0
    assert factors({"f32": 100.0}, {"f32": 256}) == {"f32": 1.0}


def test_limits():
    """132 processors at 1980 MHz with 256 multiply-adds make 133.8 TFLOP/s; bytes have the card's 5.2 a clock."""
    row = Row("conv3d", "1x", "", "fp16", flop=133.8e9, moved=1e9)
    products, memory = limits(row, RATIO)
    assert products == pytest.approx(1.0, rel=1e-3)
    assert memory == pytest.approx(1e3 / (896e9 / (70 * 2452e6) * 132 * 1980e6 / 1e9), rel=1e-6)
    assert limits(Row("conv3d", "1x", "", "int8", "s32", flop=133.8e9), RATIO)[0] == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(("row", "word"), [
    (Row("conv3d", "1x", "", "fp16", ms=1.05, flop=133.8e9, moved=1e8), "products"),
    (Row("conv3d", "1x", "", "fp16", ms=3.0, flop=133.8e9, moved=1e8), "neither: issue, latency, the ends of tiles"),
    (Row("norm_act", "1x", "", "fp16", ms=0.9, moved=1e9), "memory"),
    (Row("norm_act", "1x", "", "fp16", ms=0.5, moved=1e9), "memory on the card, which has less of it"),
    (Row("rotated", "1x", "", "fp16", ms=0.9, moved=1e6), "not counted"),
    (Row(BETWEEN, "", "", "", ms=1.0), "copies, torch's own kernels, the host"),
])  # fmt: skip
def test_words(row, word):
    found = list(lines(Profile("", 2, 4.0, 5.0, {}, [row]), RATIO))
    assert len(found) == 2 and found[1].endswith(word) and f"{row.ms / 2:.3f}" in found[1]


def test_profile_says_what_waits(monkeypatch, capsys):
    """On a CPU, where torch makes all products: that is refused, and without the refusal the table follows."""
    from zerowaste_vae.engine.extras.bench.ratio import foreign
    from zerowaste_vae.engine.extras.cli import main, profile

    monkeypatch.setattr(profile, "ratio_asked", lambda *_: RATIO)
    monkeypatch.setattr(Ratio, "running", lambda self: nullcontext())
    small = ["--weights", "demo", "--device", "cpu", "--size", "64x48", "--frames", "1", "--runs", "1"]
    asked = ["profile", "decode", *small]
    assert main(asked) == 2
    assert "of its products are torch's own" in capsys.readouterr().err
    monkeypatch.setattr(foreign, "SHARE", 2.0)
    assert main(asked) == 0
    text = capsys.readouterr().out
    table = text[text.index("what waits, at the ratio of RTX 5070 Ti (") :].splitlines()
    assert table[1].split()[0] == "operator" and any(line.startswith("conv3d") for line in table[2:])
