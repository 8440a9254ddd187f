"""Means of a few values each, added to convolutions that gather the same values."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def mean(x: Tensor, dim: int) -> Tensor:
    """Return x.mean(dim), summed in one order: torch's order on a CPU depends on the number of values, and so on the
    chunk."""
    total = functools.reduce(torch.add, (part.float() for part in x.unbind(dim)))
    return (total / x.shape[dim]).to(x.dtype)
