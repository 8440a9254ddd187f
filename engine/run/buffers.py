"""Where a parked history's band visits the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .history import Band

#: A convolution's band of so many new frames.
Use = tuple[str, Band, int]


@dataclass
class Buffer:
    """Bytes [start, end) of the memory on the GPU that uses pass through; once entered, `view` is [history + frames,
    rows, W + 2, C]."""

    use: Use
    start: int
    end: int
    data: Tensor
    view: Tensor | None = None
    #: Whether its history has been asked for, and when that is there.
    fetched: bool = False
    arrived: torch.cuda.Event | None = None
    #: What was here before is stored: new frames may be written.
    free: torch.cuda.Event | None = None
    #: What the next use of this memory waits for: its history is stored, its convolution done.
    stored: torch.cuda.Event | None = None
    read: torch.cuda.Event | None = None
    #: All frames that it leaves to the next pass are copies of one.
    same: bool = False

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end
