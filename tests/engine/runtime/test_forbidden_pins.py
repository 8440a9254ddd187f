"""Page-locking that a user has forbidden, how much of it is asked for at once, and how much of Windows."""

from __future__ import annotations

import pytest
import torch
from zerowaste_vae.engine.runtime import pinned
from zerowaste_vae.engine.system import memory


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
    """CUDA's functions that lock and unlock, up to `most` pieces; `locked`: bytes by address."""

    def __init__(self, most: int = 1000) -> None:
        self.locked, self.most, self.asked = {}, most, 0

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        self.asked += 1
        assert address % pinned.PAGE == 0 and size <= pinned.PIECE
        if len(self.locked) == self.most:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_windows_quarter(gpu, monkeypatch):
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


def test_partly_granted(gpu, monkeypatch):
    """A block is locked piece by piece up to the first refusal, which is said once, and no copy reaches over an end."""
    runtime, said = Runtime(most=2), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(pinned, "PIECE", 2 * pinned.PAGE)
    monkeypatch.setattr(pinned.log, "once", lambda text, *_: said.append(text))
    pool = pinned.PinnedPool()
    block = pool.take(9 * pinned.PAGE)
    assert list(runtime.locked.values()) == [2 * pinned.PAGE] * 2 and runtime.asked == 3
    assert len(said) == 1 and "refuses to page-lock" in said[0]
    pool.give(block)
    pool.release()
    assert not runtime.locked and pool.nbytes == 0


@pytest.mark.parametrize("start", [0, 3, 512, 1021])
@pytest.mark.parametrize("into", [True, False])
def test_a_copy_ends_where_a_piece_does(start, into, monkeypatch):
    monkeypatch.setattr(pinned, "PIECE", 1024)
    block, other = torch.zeros(9000, dtype=torch.uint8), torch.randn(3, 5, 70)
    inside = block[4 * start :].view(-1)[: other.nbytes].view(torch.float32).view_as(other)
    spans, whole = [], torch.Tensor.copy_

    def note(target: torch.Tensor, source: torch.Tensor, **options: object) -> torch.Tensor:
        at = (target if into else source).data_ptr() - block.data_ptr()
        spans.append((at // 1024, (at + source.nbytes - 1) // 1024))
        return whole(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", note)
    if into:
        pinned.copy(inside, other, block, True)
    else:
        whole(inside, torch.randn(3, 5, 70))
        pinned.copy(other, inside, block, True)
    assert torch.equal(inside, other)
    assert len(spans) >= 4 and all(first == last for first, last in spans)
    spans.clear()
    pinned.copy(other, other.clone(), block, True)
    pinned.copy(other, other.clone(), None, True)
    assert len(spans) == 2
