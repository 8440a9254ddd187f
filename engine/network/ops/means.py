"""Means of a few values each, beside convolutions that gather them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def mean(x: Tensor, dim: int) -> Tensor:
    """x.mean(dim), summed in one order: torch's on a CPU depends on how many there are, and so on the chunk."""
    total = functools.reduce(torch.add, (part.float() for part in x.unbind(dim)))
    return (total / x.shape[dim]).to(x.dtype)
