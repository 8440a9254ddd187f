"""Memory of a fused run's activations: a stack at each end of one block, sized by a dry walk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGN = 512  # what CUDA's allocators align to


class Arena:
    """Two stacks of tensors in one block, which grow towards each other; all but `turn` is about the one in use. Before
    `allocate` it hands out meta tensors and learns how large it must be."""

    def __init__(self) -> None:
        self.peak = 0
        self._tops = [0, 0]
        self._end = 0
        self._block: Tensor | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that lives until its scope ends, or its stack is cleared by `turn`."""
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
        """Where both stacks end."""
        return tuple(self._tops)  # type: ignore[return-value]

    def turn(self, tops: tuple[int, int]) -> None:
        """Go on with the other stack, cleared down to its end in `tops`."""
        self._end ^= 1
        self._tops[self._end] = tops[self._end]

    def restart(self, tops: tuple[int, int]) -> None:
        """Go on from where both stacks ended: what is taken next lies over what is there, which stays until it is
        written to."""
        self._tops = list(tops)

    def clear(self, tops: tuple[int, int]) -> None:
        """Nobody needs what is in the other stack, down to its end in `tops`."""
        self._tops[self._end ^ 1] = tops[self._end ^ 1]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is taken inside is free again afterwards."""
        tops, end = self.tops, self._end
        try:
            yield
        finally:
            self._tops, self._end = list(tops), end

    def allocate(self, device: torch.device, within: Tensor | None = None) -> Tensor | None:
        """within: bytes to take the block from; returns those behind it."""
        if within is None:
            self._block = torch.empty(self.peak, dtype=torch.uint8, device=device)
            return None
        self._block = within[: self.peak]
        return within[self.peak :]

    def free(self) -> None:
        self._block = None
