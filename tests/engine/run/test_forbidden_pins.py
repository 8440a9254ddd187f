"""Page-locking that a user has forbidden, and how much of it Windows is asked for."""

from __future__ import annotations

import pytest
import torch
from zerowaste_vae.engine import memory
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


class Runtime:
    """CUDA's functions that lock and unlock; `locked`: bytes by address."""

    def __init__(self) -> None:
        self.locked = {}

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_windows_is_asked_for_a_quarter_of_its_memory(gpu, monkeypatch):
    """Blocks beyond are ordinary memory, and others are locked once the first are given back."""
    runtime, said = Runtime(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(memory.sys, "platform", "win32")
    monkeypatch.setattr(memory, "_windows", {"total": 12 * pinned.PAGE}.get)
    monkeypatch.setattr(pinned.log, "once", lambda text, *_: said.append(text))
    pool = pinned.PinnedPool()
    blocks = [pool.take(2 * pinned.PAGE), pool.take(2 * pinned.PAGE), pool.take(pinned.PAGE)]
    assert [b.data_ptr() in runtime.locked for b in blocks] == [True, False, True]
    assert len(said) == 1 and "up to a quarter of all" in said[0]
    for block in blocks:
        pool.give(block)
    pool.release()
    assert not runtime.locked
    assert pool.take(3 * pinned.PAGE).data_ptr() in runtime.locked
    monkeypatch.setattr(memory.sys, "platform", "linux")
    assert pool.take(99 * pinned.PAGE).data_ptr() in runtime.locked
