"""Copies between host memory and a GPU that goes on meanwhile: input read ahead, finished frames written behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.pinned import ON_THEIR_WAY, staged, staging
from ..runtime.pressure import out_of_memory
from ..system.devices import beside, uploads
from .results import Results


class StagedReader:
    """Uploads parts of a host tensor while the GPU works: through page-locked memory, on the stream for uploads.

    torch keeps and reuses the page-locked memory; the caller that reads ahead bounds how much is in transit."""

    def __init__(self, device: torch.device, ahead: bool = True) -> None:
        """Prepare to upload to `device`. ahead False: every read waits for its copy, and nothing is pinned."""
        self._device = device
        self._stream = uploads(device) if ahead and device.type == "cuda" else None

    def read(self, part: Tensor) -> Tensor:
        """Return a contiguous copy on the device.

        On CUDA, later work of the current stream waits for it; the caller does not."""
        if self._stream is None or part.device.type != "cpu":  # a tensor on a GPU cannot be pinned
            return part.to(self._device)
        locked = staged(part)
        if locked is None:
            self._stream = None
            return part.to(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            there = locked.to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        there.record_stream(current)
        return there


#: Called as finish(clip, first frame, frames, health) when frames have reached their destination. `health` is finite if
#: all their values were, before they were clamped; otherwise the call raises.
Finish = Callable[[int, int, int, float], None]


@dataclass
class _Staged:
    """Pinned memory that one write passes through."""

    pixels: Tensor
    health: Tensor
    done: torch.cuda.Event


class StagedWriter:
    """Copies finished frames to host memory while the GPU goes on: two pinned buffers or more, one of which is being
    filled.

    `write` returns at once; a buffer is emptied into the room that `out` has for it when it is needed again, and at the
    end of the `with`. Only then is it known whether its values were finite. When the `with` ends because memory ran
    out, frames in transit are still delivered; after any other error they are only waited for."""

    def __init__(
        self, out: Results, frames: int, device: torch.device, finish: Finish, ahead: bool = True, given: bool = False
    ) -> None:
        """Prepare to write from `device`, `frames` frames at once.

        Args:
            ahead: False, or no memory that can be locked: every write waits for its copy.
            given: frames are tensors of their own that nothing else writes to. The GPU then computes while they are
                copied: 43 MB of four frames of 1280x704 take 0.8 ms.
        """
        self._out = out
        self._most = frames
        self._finish = finish
        self._free: list[_Staged] = []
        self._waiting: list[tuple[int, int, int, _Staged]] = []
        self._device = device
        for _ in range((ON_THEIR_WAY if given else 2) if ahead and device.type == "cuda" else 0):
            pixels, health = staging((frames, *out.shape), out.dtype), staging(())
            if pixels is not None and health is not None:
                self._free.append(_Staged(pixels, health, torch.cuda.Event()))
        self._ahead = bool(self._free)
        self._given = given and self._ahead
        #: Of each clip, the result after the last one whose memory has been written to.
        self._touched: dict[int, int] = {}

    def __enter__(self) -> StagedWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        keep = error is None or out_of_memory(error)
        while self._waiting:
            self._deliver(keep)

    def write(self, clip: int, first: int, pixels: Tensor, health: Tensor) -> None:
        """Write frames of a clip, from the device.

        Args:
            clip: number of the clip.
            first: first frame.
            pixels: [f, H, W, C] of the output's type; they may be changed on return.
            health: float32 [], for `finish`.
        """
        for i, part in enumerate(pixels.split(self._most)):
            self._write(clip, first + i * self._most, part, health)

    def _write(self, clip: int, first: int, pixels: Tensor, health: Tensor) -> None:
        count = pixels.shape[0]
        if not self._ahead:
            target = self._out.room(clip, first, count)
            target.copy_(pixels)
            self._land(clip, first, target, health)
            return
        if not self._free:
            self._deliver(keep=True)
        buffer = self._free.pop()
        with beside(self._device) if self._given else nullcontext():
            stream = torch.cuda.current_stream(self._device)
            buffer.pixels[:count].copy_(pixels, non_blocking=True)
            buffer.health.copy_(health, non_blocking=True)
            buffer.done.record(stream)
            for t in (pixels, health) if self._given else ():
                t.record_stream(stream)
        self._waiting.append((clip, first, count, buffer))

    def _deliver(self, keep: bool) -> None:
        clip, first, count, buffer = self._waiting[0]  # it stays the next one if there is no room for it
        target = self._out.room(clip, first, count) if keep else None
        if keep:
            self._touch(clip, first, target, buffer.done)
        buffer.done.synchronize()
        self._waiting.pop(0)
        self._free.append(buffer)
        if keep:
            target.copy_(buffer.pixels[:count])
            self._land(clip, first, target, buffer.health)

    def _touch(self, clip: int, first: int, target: Tensor, done: torch.cuda.Event) -> None:
        """Write to the memory of results while waiting for them, and of later ones: the first touch of fresh pages
        takes longer than the copy (43 MB: 5 ms)."""
        at, end = max(first, self._touched.get(clip, 0)), first + len(target)
        while not done.query() and (at < end or self._out.spare(clip, at)):
            (target[at - first] if at < end else self._out.room(clip, at, 1)).zero_()
            at += 1
        self._touched[clip] = at

    def _land(self, clip: int, first: int, target: Tensor, health: Tensor) -> None:
        self._finish(clip, first, len(target), float(health))
        self._out.land(clip, first, target)
