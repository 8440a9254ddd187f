"""Fixtures of tests of several devices."""

import pytest
from zerowaste_vae import load
from zerowaste_vae.engine.extras.distributed import shares


@pytest.fixture
def fused():
    return False


@pytest.fixture
def small(fused, make_vae_file, monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None if fused else "off")
    return load(make_vae_file((8, 8, 8, 8), (8, 8, 8, 8), 2, 3), device="cpu")


@pytest.fixture
def early(monkeypatch):
    """Every device gets a part of short clips, whatever its lead takes."""
    monkeypatch.setattr(shares.Leads, "__call__", lambda self, first: 0.1 * bool(first))
