"""The storage every operator agrees on: a ring of bordered channels-last frames that a convolution reads in place.

`[slots, H + 2, W + 2, C]`; slots = halo + frames per chunk. The producer of a conv's input writes frames straight into
it, borders included; the conv reads `halo + D` slots from `start` on. Moving `start` by D keeps the last frames as the
next chunk's halo: no concatenation, no padding pass, no copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .conv3d.types import padded_channels


@dataclass
class HaloBuffer:
    """data: [slots, H + 2 * border, W + 2 * border, C]; start: slot of the oldest frame the next conv reads."""

    data: Tensor
    halo: int
    border: int = 1
    start: int = 0

    @classmethod
    def empty(cls, frames: int, size: tuple[int, int], channels: int, dtype: torch.dtype, device: torch.device | str,
              halo: int = 2, border: int = 1) -> HaloBuffer:
        """Uninitialised: norm_act and `write_frame` fill whole frames; `inside` writers call `clear_border` once."""
        shape = (halo + frames, size[0] + 2 * border, size[1] + 2 * border, padded_channels(channels, dtype))
        return cls(torch.empty(shape, dtype=dtype, device=device), halo, border)

    @property
    def slots(self) -> int:
        return self.data.shape[0]

    def slot(self, frame: int) -> int:
        """Slot of the chunk's frame `frame`; negative frames are the halo."""
        return (self.start + self.halo + frame) % self.slots

    def inside(self, frame: int, count: int, channels: int) -> Tensor:
        """View [count, H, W, channels] of frames from `frame` on, for a conv that stores straight into this buffer.

        Raises ValueError where the run wraps around the ring: keep start at 0 (`rewind`) for such buffers.
        """
        first, b = self.slot(frame), self.border
        if first + count > self.slots:
            raise ValueError(f"{count} frames from slot {first} wrap around {self.slots} slots")
        rows = slice(b, self.data.shape[1] - b)
        return self.data[first : first + count, rows, slice(b, self.data.shape[2] - b), :channels]

    def clear_border(self) -> None:
        """Zero the frame of border positions of every slot."""
        if self.border:
            b = self.border
            self.data[:, :b] = 0
            self.data[:, -b:] = 0
            self.data[:, :, :b] = 0
            self.data[:, :, -b:] = 0

    def begin(self) -> None:
        """A clip starts: fill the halo with copies of the chunk's first frame (already written)."""
        for frame in range(-self.halo, 0):
            self.data[self.slot(frame)].copy_(self.data[self.slot(0)])

    def begin_zero(self) -> None:
        """A clip of an architecture whose history starts with zeros."""
        for frame in range(-self.halo, 0):
            self.data[self.slot(frame)].zero_()

    def advance(self, frames: int) -> None:
        """The chunk of `frames` has been read: its last `halo` frames become the history."""
        self.start = (self.start + frames) % self.slots

    def rewind(self) -> None:
        """Move the history to the front (a copy of `halo` frames)."""
        if self.start:
            kept = [self.data[self.slot(f)].clone() for f in range(-self.halo, 0)]
            self.start = 0
            for frame, data in zip(range(-self.halo, 0), kept, strict=True):
                self.data[self.slot(frame)].copy_(data)
