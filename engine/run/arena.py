"""Memory of a fused run's activations: a stack in one block, sized by a dry walk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGN = 512  # what CUDA's allocators align to


class Arena:
    """A stack of tensors in one block. Before `allocate` it hands out meta tensors and learns how large it must be."""

    def __init__(self) -> None:
        self.peak = 0
        self._top = 0
        self._block: Tensor | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that lives until its scope ends."""
        size = math.prod(shape) * dtype.itemsize
        start = self._top
        self._top += -(-size // ALIGN) * ALIGN
        if self._block is None:
            self.peak = max(self.peak, self._top)
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._block[start : start + size].view(dtype).view(shape)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is taken inside is free again afterwards."""
        top = self._top
        try:
            yield
        finally:
            self._top = top

    def allocate(self, device: torch.device, within: Tensor | None = None) -> Tensor | None:
        """within: bytes to take the block from; returns those behind it."""
        if within is None:
            self._block = torch.empty(self.peak, dtype=torch.uint8, device=device)
            return None
        self._block = within[: self.peak]
        return within[self.peak :]

    def free(self) -> None:
        self._block = None
