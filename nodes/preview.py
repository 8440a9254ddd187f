"""Frames shown during a decode, taken from the result as it fills."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from ..engine.run.plan import Plan

#: Longest side shown, in pixels, and seconds between two pictures.
SIZE, INTERVAL = 512, 0.5
#: Steps that copies out of a GPU may lag.
LAG = 2


class Preview:
    """A callable preview(done, total) -> a picture of the newest finished frame, or None if one came just before."""

    def __init__(
        self, frames: Tensor, plan: Plan, latents: int, count: Callable[[int], int], on_gpu: bool
    ) -> None:
        """frames: the decode's result [B, F, H, W, 3] in 0..1; latents: of the clip; its first n are count(n)
        frames."""
        self._frames = frames
        self._latents, self._count = latents, count
        self._chunk = plan.steps.latents
        self._tiled, self._passes = plan.tiled, len(plan.grid) + 1 if plan.tiled else 1
        self._behind = LAG * (plan.steps.frames or count(self._chunk + 1) - count(1)) if on_gpu else 0
        self._shown = -INTERVAL

    def __call__(self, done: int, total: int) -> Image.Image | None:
        now = time.perf_counter()
        index = self._newest(done, total)
        if index is None or now - self._shown < INTERVAL:
            return None
        self._shown = now
        frame = self._frames[index]
        step = max(1, max(frame.shape[:2]) // SIZE)
        pixels = frame[::step, ::step, :3].float().clamp(0, 1).mul(255).round().to(torch.uint8)
        return Image.fromarray(pixels.numpy())

    def _newest(self, done: int, total: int) -> tuple[int, int] | None:
        """Return the (clip, frame) that is finished after `done` steps; with tiles, the newest that the current one has
        reached."""
        chunks = -(-self._latents // self._chunk)
        clip, step = divmod(done - 1, chunks * self._passes)
        part, chunk = divmod(step, chunks)
        if self._tiled and part == 0:
            return None
        latents = min(self._latents, (chunk + 1) * self._chunk)
        frame = self._count(latents) - 1 - self._behind
        return (clip, frame) if frame >= 0 else None
