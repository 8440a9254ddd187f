"""Page-locked host memory, locked once and used again: locking 4 GiB takes 0.5 s, as long as decoding 16 frames."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from .. import log
from ..system.memory import lockable_ram

#: Blocks are locked in whole pages of this many bytes.
PAGE = 1 << 16
#: Distance in bytes of two addresses that are in different pages on every system.
TOUCH = 1 << 12
#: Most bytes that are locked by one call. Where the system grants some pieces of a block and then no more, those stay.
PIECE = 256 << 20

#: Results, each a tensor of its own, that may be on their way to host memory. While one is stored there, the GPU has
#: the work of the others.
ON_THEIR_WAY = 3


class Ledger(Protocol):
    """Whoever else page-locks memory of this process and counts it, as ComfyUI does for models: systems grant a part of
    all memory, on Windows about half, to everybody together. Its methods may be called in any thread."""

    def grant(self, size: int) -> bool:
        """Return True if `size` more bytes may be locked now, and count them."""

    def free(self, size: int) -> None:
        """Count `size` bytes no more."""


class PinnedPool:
    """Blocks of host memory for copies that overlap with the GPU's work.

    Without CUDA, or where the system refuses to lock pages, blocks or the ends of them are ordinary memory: copies are
    then slower, not wrong. No copy may reach from one piece of a block into the next: see `copy`. Threads may share a
    pool."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._idle: list[Tensor] = []
        self._locked: dict[int, int] = {}  # address of a piece -> bytes
        #: Bytes of all blocks, idle or in use.
        self.nbytes = 0
        #: Grants and counts what is locked, if anybody does.
        self.ledger: Ledger | None = None

    def take(self, size: int, spare: int = 0) -> Tensor:
        """Return a uint8 tensor of at least `size` bytes; hand it to `give` afterwards.

        It is the idle block that fits best. If none does, all are freed first, so that a pool never holds more than was
        in use at once, and the new block gets `spare` more bytes, for a next time that needs a little more."""
        with self._lock:
            fitting = [b for b in self._idle if b.numel() >= size]
            if fitting:
                block = min(fitting, key=Tensor.numel)
                self._idle = [b for b in self._idle if b is not block]
                return block
            self.release()
            with torch.inference_mode(False):  # whatever the caller's mode: others will use the block
                whole = -(-max(size + spare, 1) // PAGE) * PAGE
                block = torch.empty(whole + PAGE, dtype=torch.uint8, device="cpu")
                block = block[-block.data_ptr() % PAGE :][:whole]  # no page is locked twice, as part of two pieces
            self.nbytes += block.numel()
            self._page_lock(block)
            return block

    def give(self, block: Tensor) -> None:
        """Take a block back; no copy into or out of it may still be running."""
        with self._lock:
            self._idle.append(block)

    @property
    def idle_bytes(self) -> int:
        """Return the bytes of the blocks that `take` uses again or frees."""
        with self._lock:
            return sum(map(Tensor.numel, self._idle))

    def release(self) -> None:
        """Free every idle block."""
        with self._lock:
            for block in self._idle:
                for piece in block.split(PIECE):
                    size = self._locked.pop(piece.data_ptr(), 0)
                    if size and self.ledger is not None:
                        self.ledger.free(size)
                    if size and int(torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())):
                        _drain()
                self.nbytes -= block.numel()
            self._idle.clear()

    def _page_lock(self, block: Tensor) -> None:
        if _forbidden or not torch.cuda.is_available():
            return
        most = lockable_ram()
        for piece in block.split(PIECE):
            size = piece.numel()
            if most is not None and sum(self._locked.values()) + size > most:
                log.once(
                    f"host memory is page-locked up to a quarter of all ({most / 2**30:.1f} GB) on Windows: copies of "
                    "what lies beyond wait for the GPU: slower, the same frames"
                )
                return
            if self.ledger is not None and not self.ledger.grant(size):
                log.once(
                    "the models of this process page-lock as much host memory as they may together: copies of what is "
                    "parked there wait for the GPU: slower, the same frames"
                )
                return
            # The system finds pages for several threads at once here, but one by one while it locks them: touching and
            # then locking 4 GiB takes 0.3 + 0.2 s instead of 1.5 (16 cores).
            piece[::TOUCH].fill_(0)
            error = torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), size, 0)
            if int(error):
                if self.ledger is not None:
                    self.ledger.free(size)
                done = (piece.data_ptr() - block.data_ptr()) / 2**30
                _refused(f"what follows {done:.2f} of {block.numel() / 2**30:.2f} GB ({error})")
                return
            self._locked[piece.data_ptr()] = size


def copy(target: Tensor, source: Tensor, block: Tensor | None, non_blocking: bool) -> None:
    """Copy `source` to `target`, contiguous tensors of which one may lie in `block` of a pool.

    CUDA may refuse one copy of pages that were locked by two calls, or of which only some are locked: each copy ends
    where a piece of the block does."""
    places = [] if block is None else [t.data_ptr() - block.data_ptr() for t in (target, source)]
    at = next((place for place in places if 0 <= place < block.numel()), None)
    if at is None or at // PIECE == (at + source.nbytes - 1) // PIECE:
        target.copy_(source, non_blocking=non_blocking)
        return
    edges = [edge // source.element_size() for edge in range(PIECE - at % PIECE, source.nbytes, PIECE)]
    for first, last in pairwise([0, *edges, source.numel()]):
        target.view(-1)[first:last].copy_(source.view(-1)[first:last], non_blocking=non_blocking)


#: One for the process: page-locked memory is a resource of the machine.
POOL = PinnedPool()
#: Bytes that `sent` copies at once.
SENT = 16 << 20


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor's copy on a device; on a GPU by way of page-locked memory, as the driver has one thread copy
    other memory (182 MB: 29 ms)."""
    if device.type != "cuda" or x.nbytes <= SENT:
        return x.to(device)
    order = sorted(range(x.ndim), key=x.stride, reverse=True)  # as it lies in memory
    x = x.permute(order).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    source, target = (t.view(-1).view(torch.uint8) for t in (x, out))
    block = POOL.take(2 * SENT)
    try:
        halves = [(part, torch.cuda.Event()) for part in block[: 2 * SENT].split(SENT)]
        for i, (here, there) in enumerate(zip(source.split(SENT), target.split(SENT), strict=True)):
            part, done = halves[i % 2]
            done.synchronize()
            there.copy_(part[: len(here)].copy_(here), non_blocking=True)
            done.record(torch.cuda.current_stream(device))
        for _, done in halves:
            done.synchronize()
    finally:
        POOL.give(block)
    return out.permute([order.index(axis) for axis in range(x.ndim)])


_forbidden = ""


def forbid(reason: str) -> None:
    """Lock no host memory in this process, as if the system refused it. reason: the user's setting, for the log."""
    global _forbidden
    _forbidden = reason
    log.once(f"host memory is not page-locked ({reason}): copies wait for the GPU: slower, the same frames", log.info)


def page_locked(size: int) -> int:
    """Return the bytes that `staging` takes for a tensor of `size` bytes: torch locks powers of two."""
    return 1 << max(size - 1, 0).bit_length()


def staging(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Return page-locked memory of torch's own; None if it is forbidden or the system refuses, which is logged."""
    return _granted(lambda: torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu"))


def staged(part: Tensor) -> Tensor | None:
    """Return a page-locked copy of a host tensor; None as `staging`."""
    return _granted(part.pin_memory)


def _granted(lock: Callable[[], Tensor]) -> Tensor | None:
    if _forbidden:
        return None
    try:
        return lock()
    except RuntimeError as error:
        _refused(str(error).splitlines()[0])
        return None


def _refused(reason: str) -> None:
    """Log once what a refusal means, and clear CUDA's error."""
    log.debug(f"not page-locked: {reason}")
    cure = "a higher limit for locked memory (ulimit -l), or less of it in other programs' use, makes them fast"
    if sys.platform == "win32":
        cure = ("Windows grants about half of all memory to all programs together: fewer models in host memory, a "
                "lower ram_gb or fewer programs beside this one make them fast")  # fmt: skip
    log.once(
        "the system refuses to page-lock host memory: copies wait for the GPU, which is slower and changes nothing "
        f"else; {cure}"
    )
    _drain()


def _drain() -> None:
    """Clear the error that a refused CUDA call leaves, by launching one addition.

    Otherwise the thread's next launch would raise it as its own."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.empty((), device="cuda", dtype=torch.float32).add_(1)
