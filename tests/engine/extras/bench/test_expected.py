"""The expected time of a decode on another card, by its formula, from data that say what was timed."""

import json
from dataclasses import replace

import pytest
from zerowaste_vae.engine.extras.bench import expected as module
from zerowaste_vae.engine.extras.bench.expected import DATA, Expected, expected
from zerowaste_vae.engine.families import DEFAULT, by_name
from zerowaste_vae.engine.kernels.gpus import find

CONFIG = DEFAULT.published.config
SIZE = 6, 90, 160
FRAMES = 21
GPU = find("RTX 5070 Ti", "--card").gpu


def entry(*rows, **other):
    made = {"family": DEFAULT.name, "half": "decoder", "precision": "fp16", "rates": "geforce", "on": [],
            "frames": FRAMES, "latents": list(SIZE), "host_ms": 0.0, "source": "a test"}  # fmt: skip
    full = [{"products": True, "clocks": 0.0, "gb": 0.0, "l2_gb": 0.0} | row for row in rows]
    return {"format": 1, "entries": [made | {"rows": full} | other]}


def of(data, gpu=GPU, size=SIZE, precision="fp16", config=CONFIG, **other):
    return expected(gpu, DEFAULT, config, "decoder", precision, *size, data=data, **other)


def test_products_take_the_cards_processors_and_clock():
    """A million clocks of a processor a frame, on 70 processors at the listed clock and at the one under load."""
    found = of(entry({"clocks": 1000.0}))
    clocks = 21 * 1e9 / 70
    assert found.frames == FRAMES
    assert (found.low, found.high) == pytest.approx((clocks / 2760e6, clocks / 2452e6))
    assert found.text.startswith("expected ") and "computed, not measured on it (-10 to +15 %" in found.text
    assert "a test" in found.text


def test_the_slowest_unit_counts():
    """Bytes at nine tenths of the bandwidth; at the upper edge three tenths of them beside no product; 15 bytes from
    L2 for each clock and processor."""
    moved = 21 * 2.0 / (0.9 * 896)
    made = 21 * 500e6 / (70 * 2452e6)
    bound = of(entry({"gb": 2.0}))
    assert (bound.low, bound.high) == pytest.approx((moved, moved))
    both = of(entry({"gb": 2.0, "clocks": 500.0}))
    assert both.high == pytest.approx(made + 0.3 * moved) and both.low == pytest.approx(21 * 500e6 / (70 * 2760e6))
    alone = of(entry({"gb": 2.0, "clocks": 500.0, "products": False}))
    assert alone.high == pytest.approx(made)
    fetched = of(entry({"l2_gb": 30.0, "clocks": 1.0}))
    assert fetched.high == pytest.approx(21 * 30e9 / (15 * 70 * 2452e6))


def test_the_hosts_part_is_no_cards():
    for gpu in (GPU, find("RTX 3060", "").gpu):
        assert of(entry(host_ms=2.0), gpu).low == of(entry(host_ms=2.0), gpu).high == pytest.approx(21 * 2e-3)


def test_larger_clips_take_their_share_more():
    small, large = (of(entry({"clocks": 1000.0}), size=size) for size in (SIZE, (6, 180, 320)))
    work = [DEFAULT.program("decoder", CONFIG).work(*size).composed_flop for size in (SIZE, (6, 180, 320))]
    assert large.high / small.high == pytest.approx(work[1] / work[0]) and large.frames == small.frames
    longer = of(entry({"clocks": 1000.0}), size=(21, 90, 160))
    assert longer.frames == 81 and 3.3 < longer.high / small.high < 4.1


@pytest.mark.parametrize(("name", "precision", "bars"), [
    ("RTX 5090", "fp16", (0.10, 0.15)), ("RTX 5090", "int8", (0.10, 0.45)), ("RTX 4090", "fp16_fast", (0.10, 0.25)),
    ("RTX 3060", "fp16", (0.10, 0.45)),
])  # fmt: skip
def test_bars(name, precision, bars):
    found = of(entry({"clocks": 1.0}, precision=precision), find(name, "").gpu, precision=precision)
    assert (found.below, found.above) == pytest.approx(bars)


@pytest.mark.parametrize("change", [
    {"precision": "fp8"}, {"gpu": find("RTX PRO 6000", "").gpu}, {"gpu": find("H200", "").gpu}, {"winograd": True},
])  # fmt: skip
def test_what_was_not_timed_is_said(change):
    assert of(entry({"clocks": 1.0}), **change).startswith("not timed: seedvr2 ")


def test_other_widths_are_not_timed():
    narrow = replace(CONFIG, decoder_widths=(64, 128, 256, 256))
    assert "other widths" in of(entry({"clocks": 1.0}), config=narrow)


def test_data():
    """Every entry of the file that ships is of a family's published decoder, and gives a time."""
    entries = json.loads(DATA.read_text(encoding="utf-8"))["entries"]
    seen = set()
    for one in entries:
        a = by_name(one["family"])
        key = one["family"], one["precision"], one["rates"], *one["on"]
        assert key not in seen and one["source"] and one["rows"]
        seen.add(key)
        form, size = "winograd" in one["on"], one["latents"]
        found = expected(GPU, a, a.published.config, one["half"], one["precision"], *size, form)
        assert isinstance(found, Expected) and 0 < found.low < found.high < 3600 and found.frames == one["frames"]


def test_data_of_another_format_is_refused(monkeypatch, tmp_path):
    (tmp_path / "ratio.json").write_text('{"format": 9, "entries": []}')
    monkeypatch.setattr(module, "DATA", tmp_path / "ratio.json")
    module._read.cache_clear()
    with pytest.raises(ValueError, match="has format 9"):
        of(None)
    module._read.cache_clear()
