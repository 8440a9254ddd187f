"""Rows at a ratio stand beside those with products as they are; other bits are an error."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from zerowaste_vae.engine.extras.bench.measure import Case
from zerowaste_vae.engine.extras.bench.ratio import decode
from zerowaste_vae.engine.extras.bench.ratio.run import PLAIN
from zerowaste_vae.engine.extras.bench.ratio.text import RatioError
from zerowaste_vae.engine.extras.bench.speed_limit import Rates


class Ratio:
    """k of 5 for every kind; `log` says in what order things run."""

    gpu = SimpleNamespace(name="RTX 5070 Ti")
    factors = dict.fromkeys(PLAIN, 5.0)

    def __init__(self, log, factors=None):
        self.log, self.factors = log, factors or self.factors

    def scaled(self, factors):
        return Ratio(self.log, factors)

    def tflops(self, kind):
        return {"f32": 600.0, "f16": 700.0, "s32": 1200.0}[kind] / self.factors[kind]

    @contextmanager
    def running(self):
        self.log.append(f"in {self.factors['f32']}")
        yield
        self.log.append("out")


@pytest.fixture
def bench(monkeypatch):
    log = []

    def ours(case):
        log.append("ours")
        return {"who": "this pack", "digest": made.digests.pop(0), "limit": made.ceilings[case.precision].matrix}

    made = SimpleNamespace(ours=ours, ceilings={}, digests=["a", "a"], log=log,
                           rates=lambda precision: Rates("float16", 800.0, 4.0))  # fmt: skip
    monkeypatch.setattr(decode, "_refuse_foreign", lambda *_: log.append("foreign"))
    return made


@pytest.mark.parametrize(("precision", "limit"), [("fp16", 600.0), ("fp16_fast", 700.0), ("int8", 1200.0)])
def test_both_forms(bench, precision, limit):
    rows = list(decode.rows(bench, Case("decoder", precision, 21, 1280, 720), Ratio(bench.log)))
    assert bench.log == ["in 1.0", "foreign", "ours", "out", "in 5.0", "ours", "out"]
    assert [row["who"] for row in rows] == ["this pack, products as they are", "this pack, at the ratio of RTX 5070 Ti"]
    assert [row["limit"] for row in rows] == [limit, limit / 5]
    assert rows[1]["ratio"] == {"card": "RTX 5070 Ti", "factors": dict.fromkeys(PLAIN, 5.0)}


def test_other_bits(bench):
    bench.digests = ["a", "b"]
    with pytest.raises(RatioError, match="a decoder gives other bits than with products as they are"):
        list(decode.rows(bench, Case("decoder", "fp16", 21, 1280, 720), Ratio(bench.log)))
