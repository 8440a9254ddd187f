"""The way of a chunk through a fused decoder, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.to_pixels import BYTES, UNIT, Pixels
from .parking import Parking
from .run import Run
from .weights import Attention

#: Tiles are clamped after they are blended.
UNCLAMPED = Pixels(UNIT.gain, UNIT.offset, float("-inf"), float("inf"))


class StagedDecoder:
    """How a chunk goes through a decoder that doubles rows and columns three times, and frames the first two times.

    Subclasses hold packed weights and make the steps of one architecture; one of them serves any number of Runs.
    Residual streams are [frames, H, W, C].
    """

    #: What convolutions see before a clip, as in Run.
    head = "replicate"
    dtype: torch.dtype
    attention: Attention
    #: Channels of the latent, and of what `_front` makes of it.
    latent_channels: int
    features: int
    #: Bytes of the packed weights.
    nbytes: int

    def plan(
        self, latents: int, height: int, width: int, frames: int, output: torch.dtype, device: torch.device,
        parking: Parking | None = None,
    ) -> Run:
        """A dry Run that knows its memory: chunks of `latents`, `frames` per step at 8x."""
        run = Run(self.dtype, device, parking, self.head)
        # Not the clip's start: from there on a latent is as many frames as it can be.
        run.done.update(latents=1, twice=1, frames=1)
        z = torch.empty(latents, height, width, self.latent_channels, device="meta", dtype=self.dtype)
        self.chunk(run, z, frames, output, lambda pixels: None)
        return run

    def plan_front(self, latents: int, height: int, width: int, device: torch.device) -> Run:
        """A dry Run for `front_chunk`."""
        run = Run(self.dtype, device, head=self.head)
        z = torch.empty(latents, height, width, self.latent_channels, device="meta", dtype=self.dtype)
        self.front_chunk(run, z, lambda features: None)
        return run

    def plan_tile(self, latents: int, height: int, width: int, frames: int, device: torch.device) -> Run:
        """A dry Run for `tile_chunk`; sizes of the tile."""
        run = Run(self.dtype, device, head=self.head)
        run.done.update(latents=1, twice=1, frames=1)
        x = torch.empty(latents, height, width, self.features, device="meta", dtype=self.dtype)
        self.tile_chunk(run, x, frames, lambda pixels: None)
        return run

    def chunk(self, run: Run, z: Tensor, frames: int, output: torch.dtype, emit: Callable[[Tensor], None]) -> None:
        """Decode latents [D, h, w, C] (any strides); `emit` gets pixels [m, H, W, 3], valid until it returns.

        frames: most frames per step at full size (0: all of the chunk). Pixels are 0..1, or bytes 0..255.
        """
        form = BYTES if output == torch.uint8 else UNIT
        self._after_front(run, z.shape[:3], lambda: self._front(run, z), frames, output, form, emit)

    def whole_chunk(self, run: Run, frames: int, output: torch.dtype, z: Tensor) -> Tensor:
        """As `chunk`, where all its frames make one step: their pixels, valid until the next call."""
        pixels: list[Tensor] = []
        self.chunk(run, z, frames, output, pixels.append)
        return pixels[0]

    def front_chunk(self, run: Run, z: Tensor, emit: Callable[[Tensor], None]) -> None:
        """Only the part that must see the whole frame: `emit` gets features [D, h, w, C], valid until it returns."""
        with run.arena.scope():
            x = self._front(run, z)
            run.advance(*z.shape[1:3])
            if not run.dry:
                emit(x)

    def tile_chunk(self, run: Run, x: Tensor, frames: int, emit: Callable[[Tensor], None]) -> None:
        """Features [D, h, w, C] of a tile, contiguous, overwritten -> float32 pixels as `chunk`, 0..1, not clamped."""
        self._after_front(run, x.shape[:3], lambda: x, frames, torch.float32, UNCLAMPED, emit)

    def _after_front(
        self, run: Run, size: tuple[int, ...], front: Callable[[], Tensor], frames: int, output: torch.dtype,
        form: Pixels, emit: Callable[[Tensor], None],
    ) -> None:
        """2x for the whole chunk; 4x for as many of its frames as make a step at 8x, two at least; 8x by steps."""
        with run.arena.scope():
            x = self._twice(run, size, front)
            for a, b in run.walk.spans(x.shape[0], -(-frames // 2)):
                with run.arena.scope():
                    y = self._four_times(run, x[a:b])
                    for c, d in run.walk.spans(y.shape[0], frames):
                        self._full_size(run, y[c:d], output, form, emit)
                    run.advance(*y.shape[1:3])
            run.advance(*x.shape[1:3])
        run.done["latents"] += size[0]

    def _front(self, run: Run, z: Tensor) -> Tensor:
        """What must see the whole frame: latents [D, h, w, C] -> features of that size."""
        raise NotImplementedError

    def _twice(self, run: Run, size: tuple[int, ...], front: Callable[[], Tensor]) -> Tensor:
        """The front of D latents of h x w, and all up to 2x: [F, 2h, 2w, C]. F = 2D, or 2D - 1 at the clip's start."""
        raise NotImplementedError

    def _four_times(self, run: Run, x: Tensor) -> Tensor:
        """Some frames at 2x -> [F, 4h, 4w, C]; twice the frames, one less at the clip's start."""
        raise NotImplementedError

    def _full_size(
        self, run: Run, x: Tensor, output: torch.dtype, form: Pixels, emit: Callable[[Tensor], None]
    ) -> None:
        """Some frames at 4x to their pixels."""
        raise NotImplementedError
