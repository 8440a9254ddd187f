"""A VAE just wide enough for 8-bit convolutions, and a cache folder of its own for every test."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ZEROWASTE_CACHE", str(folder))
    return folder


@pytest.fixture
def wide_file(make_vae_file):
    """Eligible: the two lower stages of both halves."""
    return make_vae_file((16, 16, 32, 32), (16, 16, 32, 32), 4, 6)
