"""Frames of a residual stream that wait for convolutions which look ahead."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from .rings import Piece


class Delay:
    """The last frames of a stream that nothing has been added to yet: at most `frames` of them, [frames, H, W, C]."""

    def __init__(
        self, name: str, frames: int, shape: tuple[int, int, int], dtype: torch.dtype,
        counts: Callable[[], Counter[str]],
    ) -> None:  # fmt: skip
        """Describe the stream.

        Args:
            name: of the counter of waiting frames.
            frames: most frames that wait.
            shape: of a frame, [H, W, C].
            dtype: of the stream.
            counts: returns the clip's current counters.
        """
        self.name, self.frames, self.shape, self.dtype = name, frames, shape, dtype
        self._counts = counts
        self.data: Tensor | None = None

    @property
    def waiting(self) -> int:
        return self._counts()[self.name]

    @waiting.setter
    def waiting(self, count: int) -> None:
        self._counts()[self.name] = count

    @property
    def whole(self) -> tuple[int, int, int, int]:
        """Return the shape of the most frames that wait."""
        return self.frames, *self.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.whole) * self.dtype.itemsize

    def allocate(self, device: torch.device) -> None:
        self.data = torch.empty((self.frames, *self.shape), dtype=self.dtype, device=device)

    def parts(self, x: Tensor, count: int) -> list[tuple[int, Tensor]]:
        """Return (first, frames) of the stream's next `count`, without copies: those that waited, then those of x."""
        waited = min(self.waiting, count)
        parts = [(0, self.data[:waited]), (waited, x[: count - waited])]
        return [(at, part) for at, part in parts if part.shape[0]]

    def take(self, x: Tensor, count: int, out: Tensor, scratch: Tensor) -> None:
        """Copy the stream's next `count` frames into `out`; the rest waits.

        Args:
            x: new frames of the stream.
            count: frames to take.
            out: may begin where x does.
            scratch: memory for the most frames that wait.
        """
        waited = self.waiting
        rest = self._rest(x, count, scratch)
        hop = waited or max(count, 1)
        # From the end, in steps whose source and target do not overlap.
        for end in range(count, waited, -hop) if waited or out.data_ptr() != x.data_ptr() else ():
            first = max(end - hop, waited)
            out[first:end].copy_(x[first - waited : end - waited])
        out[: min(waited, count)].copy_(self.data[: min(waited, count)])
        self._keep(rest)

    def skip(self, x: Tensor, count: int, scratch: Tensor) -> None:
        """Drop the stream's next `count` frames, which have been read; the rest waits."""
        self._keep(self._rest(x, count, scratch))

    def _rest(self, x: Tensor, count: int, scratch: Tensor) -> Tensor:
        """Copy the frames after the next `count` into `scratch`."""
        waited, new = self.data[count : self.waiting], x[max(count - self.waiting, 0) :]
        rest = scratch[: waited.shape[0] + new.shape[0]]
        rest[: waited.shape[0]].copy_(waited)
        rest[waited.shape[0] :].copy_(new)
        return rest

    def _keep(self, rest: Tensor) -> None:
        self.waiting = rest.shape[0]
        self.data[: self.waiting].copy_(rest)

    def history(self, key: str) -> list[Piece]:
        """Return the waiting frames, as `Ring.history`."""
        return [Piece(i, 0, self.data[i]) for i in range(self.waiting)]

    def adopt(self, key: str, frames: Tensor) -> None:
        """Let these frames wait, in place of all others."""
        self.waiting = frames.shape[0]
        self.data[: self.waiting].copy_(frames)
