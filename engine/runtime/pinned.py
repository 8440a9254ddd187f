"""Page-locked host memory, locked once and used again: locking 4 GiB takes 2.7 s, more than decoding a short clip."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import log

#: Blocks are locked in whole pages of this many bytes.
PAGE = 1 << 16


class PinnedPool:
    """Blocks of host memory for copies that run beside the GPU's work.

    Without CUDA, or where the system refuses to lock pages, blocks are ordinary memory: copies are then slower, not
    wrong.
    """

    def __init__(self) -> None:
        self._idle: list[Tensor] = []
        self._locked: set[int] = set()
        #: Bytes of all blocks, idle or in use.
        self.nbytes = 0

    def take(self, size: int, spare: int = 0) -> Tensor:
        """A uint8 tensor of at least `size` bytes; hand it to `give` afterwards. The idle block that fits best serves;
        where none does, all of them are freed first, so that a pool never holds more than was in use at once, and the
        new one gets `spare` bytes besides, for a next time that needs a little more."""
        fitting = [b for b in self._idle if b.numel() >= size]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            self._idle = [b for b in self._idle if b is not block]
            return block
        self.release()
        block = torch.empty(-(-max(size + spare, 1) // PAGE) * PAGE, dtype=torch.uint8)
        self.nbytes += block.numel()
        self._lock(block)
        return block

    def give(self, block: Tensor) -> None:
        """The block is idle again; nothing may still be copied into or out of it."""
        self._idle.append(block)

    def release(self) -> None:
        """Free every idle block."""
        for block in self._idle:
            if block.data_ptr() in self._locked:
                self._locked.discard(block.data_ptr())
                torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
            self.nbytes -= block.numel()
        self._idle.clear()

    def _lock(self, block: Tensor) -> None:
        if not torch.cuda.is_available():
            return
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)
        if int(error) == 0:
            self._locked.add(block.data_ptr())
        else:
            size = block.numel() / 2**30
            log.once(f"the system does not page-lock {size:.2f} GB of memory ({error}): copies wait for the GPU")


#: One for the process: page-locked memory is a resource of the machine.
POOL = PinnedPool()
