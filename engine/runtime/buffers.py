"""GPU buffers that the bands of a parked history pass through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .history import Band

#: One use of a parked history: a convolution's key, its band, and the number of new frames.
Use = tuple[str, Band, int]


@dataclass
class Buffer:
    """Bytes [start, end) of the GPU memory that uses pass through.

    Once the buffer is entered, `view` is [history + frames, rows, W + 2, C]."""

    use: Use
    start: int
    end: int
    data: Tensor
    view: Tensor | None = None
    #: Its history has been requested, and the event of its arrival.
    fetched: bool = False
    arrived: torch.cuda.Event | None = None
    #: The previous contents are stored: new frames may be written.
    free: torch.cuda.Event | None = None
    #: Events that the next use of this memory waits for: its history is stored, its convolution is done.
    stored: torch.cuda.Event | None = None
    read: torch.cuda.Event | None = None
    #: All frames that the next pass reads of it are copies of one.
    same: bool = False

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end
