"""Show a run while it goes on, as a line and a picture, and choose the GPUs that share its work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from PIL import Image
from torch import Tensor

from ..engine import VideoVAE
from ..engine.extras.distributed.devices import resolve
from ..engine.planning.plan import Plan

#: Seconds between two lines; each is a message to the browser.
LINE_SECONDS = 0.25


class Stages:
    """Progress of one decode or encode in words: stages(done, total) -> a line, or "" if one came just before."""

    def __init__(self, operation: str, plan: Plan, latents: int) -> None:
        """operation: "decode" or "encode"; latents: of the clip."""
        self._operation = operation
        self._chunks = -(-latents // plan.steps.unit)
        self._tiles = len(plan.grid) if plan.tiled else 0
        self._started = time.perf_counter()
        self._said = -LINE_SECONDS

    @property
    def ticks(self) -> int:
        """Return the number of calls for one clip: one for each chunk of each part."""
        return self._chunks * (self._tiles + 1)

    def __call__(self, done: int, total: int) -> str:
        spent = time.perf_counter() - self._started
        if done < total and spent - self._said < LINE_SECONDS:
            return ""
        self._said = spent
        if done == total:
            return f"{self._operation}: done in {spent:.1f} s"
        part, chunk = divmod((done - 1) % self.ticks, self._chunks)
        left = f"about {spent / done * (total - done):.0f} s left"
        return f"{self._operation}{self._part(part)}: chunk {chunk + 1} of {self._chunks}, {left}"

    def _part(self, index: int) -> str:
        """Name the part: decoding starts with the layers that see the whole frame, encoding ends with them."""
        if not self._tiles or index == (0 if self._operation == "decode" else self._tiles):
            return ", whole frames" if self._tiles else ""
        return f", tile {index + (self._operation == 'encode')} of {self._tiles}"


#: Longest side shown, in pixels, and seconds between two pictures.
PREVIEW_SIZE, PREVIEW_SECONDS = 512, 0.5
#: Steps that copies out of a GPU may lag.
LAG = 2


class Preview:
    """A callable preview(done, total) -> a picture of the newest finished frame, or None if one came just before."""

    def __init__(self, frames: Tensor, plan: Plan, latents: int, count: Callable[[int], int], on_gpu: bool) -> None:
        """frames: the decode's result [B, F, H, W, 3] in 0..1; latents: of the clip; count: latents -> frames."""
        self._frames, self._latents, self._count, self._chunk = frames, latents, count, plan.steps.unit
        self._tiled, self._passes = plan.tiled, len(plan.grid) + 1 if plan.tiled else 1
        self._behind = LAG * (plan.steps.frames or count(self._chunk + 1) - count(1)) if on_gpu else 0
        self._shown = -PREVIEW_SECONDS

    def __call__(self, done: int, total: int) -> Image.Image | None:
        now = time.perf_counter()
        index = self._newest(done, total)
        if index is None or now - self._shown < PREVIEW_SECONDS:
            return None
        self._shown = now
        frame = self._frames[index]
        step = max(1, max(frame.shape[:2]) // PREVIEW_SIZE)
        pixels = frame[::step, ::step, :3].float().clamp(0, 1).mul(255).round().to(torch.uint8)
        return Image.fromarray(pixels.numpy())

    def _newest(self, done: int, total: int) -> tuple[int, int] | None:
        """Return the (clip, frame) finished after `done` steps; with tiles, the newest that the present one reached."""
        chunks = -(-self._latents // self._chunk)
        clip, step = divmod(done - 1, chunks * self._passes)
        part, chunk = divmod(step, chunks)
        if self._tiled and part == 0:
            return None
        latents = min(self._latents, (chunk + 1) * self._chunk)
        frame = self._count(latents) - 1 - self._behind
        return (clip, frame) if frame >= 0 else None


@contextmanager
def others(
    engine: VideoVAE, gpus: str, plan: Plan | None, make_room: Callable[[int, torch.device], object]
) -> Iterator[dict[str, str]]:
    """Yield the options of a decode or encode that share the work, with room for the plan made on the other GPUs. None
    of our memory stays there afterwards: the host does not know of it."""
    if gpus == "auto":
        yield {}
        return
    for device in resolve(gpus, engine.device):
        if device != engine.device and plan is not None:
            make_room(plan.peak_bytes, device)
    try:
        yield {"devices": gpus}
    finally:
        engine.release_copies()
