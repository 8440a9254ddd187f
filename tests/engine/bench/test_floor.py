import pytest
import torch
from zerowaste_vae.engine.archs.seedvr2 import ARCHITECTURE
from zerowaste_vae.engine.bench import floor
from zerowaste_vae.engine.bench.subject import PUBLISHED


@pytest.mark.parametrize(("half", "tflop"), [("decoder", 1771.8), ("encoder", 677.9)])
def test_the_published_network_at_720p(half, tflop):
    """81 frames; both figures are those of the network as its authors wrote it."""
    work = floor.work(ARCHITECTURE, PUBLISHED, half, 21, 90, 160)
    assert work.flop * 1e-12 == pytest.approx(tflop, abs=0.05)
    assert (work.composed_flop < work.flop) == (half == "decoder")


def test_composed_upsamplers_save_a_fifth_of_the_decoder():
    work = floor.work(ARCHITECTURE, PUBLISHED, "decoder", 21, 90, 160)
    assert 0.78 < work.composed_flop / work.flop < 0.80
    # 24.2 ms per frame is the contract's floor with upsamplers composed; its bytes are counted a little roomier.
    assert 23.0 < 1e3 * work.seconds(793, 4.29, 2) / 81 < 24.2


def test_seconds_add_products_and_copies():
    work = floor.Work(2e12, 1e12, 5e11)
    assert work.seconds(10.0, 2.0, 2) == pytest.approx(0.1 + 0.5)
    assert (floor.value_bytes("fp32"), floor.value_bytes("fp16"), floor.value_bytes("fp8")) == (4, 2, 2)


def test_rates_of_this_machine():
    rates = floor.rates(torch.device("cpu"), "fp32")
    assert rates.product == "float32" and rates.matrix > 0 and rates.copy > 0
    assert floor.rates(torch.device("cpu"), "fp8").product == "float32"
