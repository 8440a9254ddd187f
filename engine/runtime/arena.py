"""Memory of a fused run's activations: a stack at each end of one block, sized by a dry run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGN = 512  # alignment of CUDA's allocators in bytes


class Arena:
    """Two stacks of tensors in one block that grow towards each other; `take` uses the current one.

    Before `allocate` it returns meta tensors and records how large it must be."""

    def __init__(self) -> None:
        self.peak = 0
        self._tops = [0, 0]
        self._end = 0
        self._block: Tensor | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that lives until its scope ends, or its stack is cleared by `turn`."""
        size = math.prod(shape) * dtype.itemsize
        start = self._tops[self._end]
        self._tops[self._end] = top = start + -(-size // ALIGN) * ALIGN
        if self._block is None:
            self.peak = max(self.peak, sum(self._tops))
            return torch.empty(shape, dtype=dtype, device="meta")
        if self._end:
            start = self._block.numel() - top
        return self._block[start : start + size].view(dtype).view(shape)

    @property
    def tops(self) -> tuple[int, int]:
        """Return the ends of both stacks, in bytes."""
        return tuple(self._tops)  # type: ignore[return-value]

    def turn(self, tops: tuple[int, int]) -> None:
        """Switch to the other stack, cut back to its end in `tops`."""
        self._end ^= 1
        self._tops[self._end] = tops[self._end]

    def restart(self, tops: tuple[int, int]) -> None:
        """Set both stacks back to the ends `tops`; later tensors lie over earlier contents.

        These stay until they are overwritten."""
        self._tops = list(tops)

    def clear(self, tops: tuple[int, int]) -> None:
        """Free the contents of the other stack down to its end in `tops`."""
        self._tops[self._end ^ 1] = tops[self._end ^ 1]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free at the end all that is taken inside."""
        tops, end = self.tops, self._end
        try:
            yield
        finally:
            self._tops, self._end = list(tops), end

    def allocate(self, device: torch.device, within: Tensor | None = None) -> Tensor | None:
        """Allocate the block, or take it from the beginning of the bytes `within` and return the rest of them."""
        if within is None:
            self._block = torch.empty(self.peak, dtype=torch.uint8, device=device)
            return None
        self._block = within[: self.peak]
        return within[self.peak :]

    def free(self) -> None:
        self._block = None
