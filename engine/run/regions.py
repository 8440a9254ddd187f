"""Finished pixels of parts of frames, from the GPU to where the frames are: no frame is put together before."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from .pinned import staging
from .pixels import Finish
from .pressure import out_of_memory
from .results import Results

#: Regions on their way.
BUFFERS = 3


class _Region(NamedTuple):
    """Pixels on their way into `target`, in a buffer where there is one. place: clip, first frame and count. done: when
    they are there. land: behind the last one of these frames, all of them."""

    place: tuple[int, int, int]
    target: Tensor
    pixels: Tensor
    health: Tensor
    done: torch.cuda.Event | None
    land: Tensor | None
    buffer: tuple[Tensor, Tensor] | None


class RegionWriter:
    """Results [f, H, W, C] of clips, region after region, through page-locked memory while the GPU goes on. As
    StagedWriter at the end of the `with`."""

    def __init__(self, results: Results, device: torch.device, finish: Finish, ahead: bool = True) -> None:
        self._results, self._device, self._finish = results, device, finish
        self._ahead = ahead and device.type == "cuda"
        self._waiting: deque[_Region] = deque()
        self._free: list[tuple[Tensor, Tensor]] = []
        self._made = 0
        self._open: tuple[int, int, Tensor] | None = None

    def __enter__(self) -> RegionWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        keep = error is None or out_of_memory(error)
        while self._waiting:
            self._deliver(keep)

    def write(
        self, clip: int, first: int, pixels: Tensor, region: tuple[slice, slice], health: Tensor, last: bool
    ) -> None:
        """pixels [f, h, w, C] in 0..1, free to change on return, become `region` (rows, columns) of frames `first`.. of
        `clip`. All regions of the same frames come one after the other; last: these are complete."""
        count = len(pixels)
        if self._open is None or self._open[:2] != (clip, first):
            self._open = clip, first, self._results.room(clip, first, count)
        room = self._open[2]
        target, land = room[:, region[0], region[1]], room if last else None
        if last:
            self._open = None
        if self._results.dtype == torch.uint8:
            pixels = (pixels * 255.0).round_()
        pixels = pixels.to(self._results.dtype)
        buffer = self._buffer(pixels) if self._ahead else None
        if buffer is None:
            self._waiting.append(_Region((clip, first, count), target, pixels, health, None, land, None))
            self._deliver(True)
            return
        staged, sum_of_one = buffer
        there = staged[: pixels.numel()].view(pixels.shape)
        there.copy_(pixels, non_blocking=True)
        sum_of_one.copy_(health, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        self._waiting.append(_Region((clip, first, count), target, there, sum_of_one, done, land, buffer))

    def _buffer(self, pixels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Page-locked memory for so many values, and one more; None where there is none."""
        size = math.prod(pixels.shape)
        while len(self._waiting) >= BUFFERS:
            self._deliver(True)
        for i, (values, _) in enumerate(self._free):
            if values.numel() >= size:
                return self._free.pop(i)
        self._free.clear()  # of another size
        values, one = staging((size,), pixels.dtype), staging(())
        self._ahead = values is not None and one is not None
        return (values, one) if self._ahead else None

    def _deliver(self, keep: bool) -> None:
        entry = self._waiting.popleft()
        if entry.done is not None:
            entry.done.synchronize()
        if keep:
            entry.target.copy_(entry.pixels)
            clip, first, count = entry.place
            self._finish(clip, first, 0 if entry.land is None else count, float(entry.health))
            if entry.land is not None:
                self._results.land(clip, first, entry.land)
        if entry.buffer is not None:
            self._free.append(entry.buffer)
