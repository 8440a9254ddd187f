"""Packed weights of the network of a pixel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PatchNetwork:
    """Weights for F features of a pixel and P pixels of a patch. F is padded with zeros behind the `features` real
    ones; products are in the type of activations, everything else is float32.

    Attributes:
        first, first_bias: [P, F, C] and [P, F], of the first stream's channels.
        second, second_bias: the same of the second stream's; SiLU follows.
        products: [blocks, 5, F, F]: of shift, scale and gate, then the first and the second of the branch.
        vectors: [blocks, 7, F]: added to shift, scale (with its 1) and gate; weight and bias of the norm; added to the
            products of the branch.
        last, last_bias: [3, F], the last norm's weight in it, and [3].
    """

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    products: Tensor
    vectors: Tensor
    last: Tensor
    last_bias: Tensor
    features: int

    @property
    def patch(self) -> int:
        """Return the pixels of a patch's side."""
        return round(len(self.first) ** 0.5)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of operands."""
        return self.first.dtype
