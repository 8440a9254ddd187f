"""Page-locking that a user has forbidden."""

from __future__ import annotations

import pytest
import torch
from zerowaste_vae.engine.run import pinned


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU on which locking a page fails the test."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("locked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", touched)
    monkeypatch.setattr(pinned, "_forbidden", "")


def test_nothing_is_locked_once_it_is_forbidden(gpu, monkeypatch):
    pool = pinned.PinnedPool()
    with pytest.raises(AssertionError, match="locked"):
        pool.take(100)
    pinned.forbid("a test")
    block = pool.take(100)
    assert block.numel() >= 100 and not block.is_pinned()
    pool.give(block)
    pool.release()
    assert pool.nbytes == 0 or pool.idle_bytes == 0
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("asked torch for locked memory"))
    assert pinned.staging((2, 2)) is None
    assert pinned.staged(torch.zeros(3)) is None
