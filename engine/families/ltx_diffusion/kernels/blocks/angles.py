"""Angles by which channels of queries and keys turn with the place of their token."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """The tokens of some rows: whole frames of height x width tokens, from the clip's frame `first` on."""

    first: int
    height: int
    width: int


@functools.lru_cache(maxsize=16)
def angles(positions: int, head: int, device: torch.device) -> Tensor:
    """Return cosines and sines of angles, float32 [positions, head / 2, 2], for every frame, row or column.

    The first channels turn with their token's frame, the next with its row, the last with its column. Rates fall from 1
    with base 10,000 along each axis.
    """
    parts = [torch.arange(n, dtype=torch.float64, device="cpu") / n for n in shares(head)]
    rates = torch.cat([10000.0**-part for part in parts]).float()
    found = torch.arange(positions, dtype=torch.float32, device="cpu")[:, None] * rates
    return torch.stack((found.cos(), found.sin()), -1).to(device)


def shares(head: int) -> tuple[int, int, int]:
    """Return the channel pairs of a head that turn with the frame, the row and the column."""
    frame = head // 4 // 2 * 2
    if (head - frame) // 2 % 2:
        frame -= 2
    rest = (head - frame) // 4
    return frame // 2, rest, rest
