"""Copy finished pixels of parts of frames from the GPU to their place in host memory."""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.pinned import staging
from ..runtime.pressure import out_of_memory
from .results import Results
from .staging import Finish

#: Most regions in transit: as many as come at once while the ones before are still being copied.
BUFFERS = 16


class _Region(NamedTuple):
    """Pixels in transit to `target`, in page-locked memory if there is some.

    place: clip, first frame and count. done: event of their arrival. land: with the last region of these frames, all of
    them."""

    place: tuple[int, int, int]
    target: Tensor
    pixels: Tensor
    health: Tensor
    done: torch.cuda.Event | None
    land: Tensor | None


class RegionWriter:
    """Writes results [f, H, W, C] of clips, region after region, in order.

    On a GPU they pass through page-locked memory, and a thread copies them on while the GPU and the caller go on. Its
    errors are raised by a later `write`, or at the end of the `with`, which ends as StagedWriter's does."""

    def __init__(self, results: Results, device: torch.device, finish: Finish, ahead: bool = True) -> None:
        self._results, self._device, self._finish = results, device, finish
        self._ahead = ahead and device.type == "cuda"
        self._inference = torch.is_inference_mode_enabled()
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[None], tuple[Tensor, Tensor]]] = deque()
        self._free: list[tuple[Tensor, Tensor]] = []
        self._open: tuple[int, int, Tensor] | None = None
        #: A region failed: its frames must not count as finished with the regions in transit after it.
        self._failed = False

    def __enter__(self) -> RegionWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        keep = error is None or out_of_memory(error)
        try:
            while self._waiting and keep:
                self._next()
        finally:
            if self._thread is not None:
                self._thread.shutdown(cancel_futures=True)
            if self._waiting:  # a late copy must not reach memory that others use by then
                torch.cuda.current_stream(self._device).synchronize()

    def write(
        self, clip: int, first: int, pixels: Tensor, region: tuple[slice, slice], health: Tensor, last: bool
    ) -> None:
        """Write pixels to a region of frames. All regions of the same frames come one after the other.

        Args:
            clip: number of the clip.
            first: first frame.
            pixels: [f, h, w, C] in 0..1; they may be changed on return.
            region: rows and columns.
            health: float32 [], for `finish`.
            last: these frames are complete with it.
        """
        count = len(pixels)
        if self._open is None or self._open[:2] != (clip, first):
            self._open = clip, first, self._results.room(clip, first, count)
        room = self._open[2]
        target, land = room[:, region[0], region[1]], room if last else None
        if last:
            self._open = None
        if self._results.dtype == torch.uint8:
            pixels = (pixels * 255.0).round_()
        pixels, place = pixels.to(self._results.dtype), (clip, first, count)
        buffer = self._buffer(pixels) if self._ahead else None
        if buffer is None:
            while self._waiting:
                self._next()
            self._deliver(_Region(place, target, pixels, health, None, land))
            return
        there = buffer[0][: pixels.numel()].view(pixels.shape)
        there.copy_(pixels, non_blocking=True)
        buffer[1].copy_(health, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "zerowaste regions")
        work = self._thread.submit(self._deliver, _Region(place, target, there, buffer[1], done, land))
        self._waiting.append((work, buffer))

    def _buffer(self, pixels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return page-locked memory for so many values, and for one more; None if there is none."""
        size = math.prod(pixels.shape)
        while len(self._waiting) >= BUFFERS or (self._waiting and self._waiting[0][0].done()):
            self._next()
        for i, (values, _) in enumerate(self._free):
            if values.numel() >= size:
                return self._free.pop(i)
        self._free.clear()  # of another size
        values, one = staging((size,), pixels.dtype), staging(())
        self._ahead = values is not None and one is not None
        return (values, one) if self._ahead else None

    def _next(self) -> None:
        """Wait for the oldest region; raise the error found with it."""
        work, buffer = self._waiting.popleft()
        work.result()
        self._free.append(buffer)

    def _deliver(self, region: _Region) -> None:
        """Copy a region to its frames, in order; in the thread if there is one."""
        if self._failed:
            return
        self._failed = True
        with torch.inference_mode(self._inference):
            if region.done is not None:
                region.done.synchronize()
            region.target.copy_(region.pixels)
            clip, first, count = region.place
            self._finish(clip, first, 0 if region.land is None else count, float(region.health))
            if region.land is not None:
                self._results.land(clip, first, region.land)
        self._failed = False
