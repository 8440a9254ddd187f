"""Chunks of parts that begin within a clip."""

import pytest
from zerowaste_vae import load
from zerowaste_vae.engine import log
from zerowaste_vae.engine.extras.distributed.parts import LATENTS_WITH_LEAD, behind_a_lead
from zerowaste_vae.engine.request import Request

from ...families.small import small as small_file


@pytest.mark.parametrize("fused", [True])
def test_length(small):
    """Parts are longer if nothing else changes."""
    def asked(half="decoder", **options):
        return behind_a_lead(small, half, (24, 90, 160), Request(**options), print)

    def peak(chunk):
        return small.plan_decode(24, 90, 160, chunk=chunk).peak_bytes

    assert peak(1) == peak(0) < peak(LATENTS_WITH_LEAD)
    assert asked() == Request(chunk=LATENTS_WITH_LEAD)
    kept = {"vram_gb": peak(1) / 2**30}, {"half": "encoder"}, {"chunk": 1}, {"tiling": "blended", "tile": 256}
    for options in kept:
        assert asked(**options).chunk == options.get("chunk", 0)


def test_plain_torch_keeps_its_own(small):
    assert behind_a_lead(small, "decoder", (24, 90, 160), Request(), print) == Request()


@pytest.mark.parametrize("name", ["cogvideox", "svd", "minimaxh3"])
def test_networks_that_decide_on_their_chunks(monkeypatch, caplog, name):
    """Nothing is said of a chunk that nobody has asked for."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    log._said.clear()
    vae = load(small_file(name), "fp32", "cpu")
    assert behind_a_lead(vae, "decoder", (21, 4, 4), Request(), print) == Request() and not caplog.records
