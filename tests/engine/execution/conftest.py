"""Small VAEs that tests bring into trouble."""

import pytest
from zerowaste_vae import load

from .faults import forget_others, leftovers


@pytest.fixture(scope="module")
def loaded(vae_file):
    """Shared by all tests: each one finds the VAEs as the trouble of the one before has left them."""
    forget_others()
    return {(p, f): load(vae_file, precision=p, device="cpu") for p in ("fp32", "fp16") for f in (True, False)}


@pytest.fixture
def make_vae(loaded, monkeypatch):
    """make_vae(precision, fused): the tiny VAE; the fused path runs on its references."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    monkeypatch.setattr("zerowaste_vae.engine.planning.fused_walk.half_not_fused", lambda *_: None)  # its widths

    def make(precision="fp32", fused=True):
        vae = loaded[precision, fused]
        vae.triton_fusion = fused
        vae.on_pressure = None
        return vae

    yield make
    assert leftovers() == []
