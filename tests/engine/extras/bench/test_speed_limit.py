import pytest
import torch
from zerowaste_vae.engine.extras.bench import speed_limit
from zerowaste_vae.engine.extras.bench.subject import PUBLISHED
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE
from zerowaste_vae.engine.network.values import Work


@pytest.mark.parametrize(("half", "tflop"), [("decoder", 1771.8), ("encoder", 677.9)])
def test_published_work(half, tflop):
    """81 frames; both figures are those of the network as its authors wrote it."""
    work = speed_limit.work(ARCHITECTURE, PUBLISHED, half, 21, 90, 160)
    assert work.flop * 1e-12 == pytest.approx(tflop, abs=0.05)
    assert (work.composed_flop < work.flop) == (half == "decoder")


def test_composed_work():
    """Composed upsamplers save a fifth of the decoder's work."""
    work = speed_limit.work(ARCHITECTURE, PUBLISHED, "decoder", 21, 90, 160)
    assert 0.78 < work.composed_flop / work.flop < 0.80
    # 24.2 ms per frame is the contract's speed limit with upsamplers composed; its bytes are counted a little roomier.
    assert 23.0 < 1e3 * speed_limit.seconds(work, "fp16", 793, 4.29) / 81 < 24.2


def test_seconds():
    """The limit adds products and copies."""
    work = Work(2e12, 1e12, 5e11)
    for precision, copies in (("fp32", 1.0), ("fp16", 0.5), ("fp8", 0.5)):
        assert speed_limit.seconds(work, precision, 10.0, 2.0) == pytest.approx(0.1 + copies)


def test_rates():
    """Both ceilings are measured on this machine."""
    rates = speed_limit.rates(torch.device("cpu"), "fp32")
    assert rates.product == "float32" and rates.matrix > 0 and rates.copy > 0
    assert speed_limit.rates(torch.device("cpu"), "fp8").product == "float32"
