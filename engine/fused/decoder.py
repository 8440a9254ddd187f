"""SeedVR2's decoder on the fused operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.to_pixels import BYTES, UNIT, Pixels
from ..models.seedvr2 import Decoder
from ..optimize import DEFAULTS, Options
from ..precision.operands import Operands
from .blocks import resnet, resnets
from .parking import Parking
from .run import Run
from .weights import Attention, Conv, Expansion, Output, Resnet, Upsampler, norm_of, tensor_bytes

#: Tiles are clamped after they are blended.
UNCLAMPED = Pixels(UNIT.gain, UNIT.offset, float("-inf"), float("inf"))


class FusedDecoder:
    """Packed weights and the order of steps. One FusedDecoder serves any number of Runs.

    Residual streams are [frames, H, W, C]. Each step's sums for the next norm come from the epilogue that stored the
    values, so no tensor is read only to be measured (except once after attention).
    """

    def __init__(
        self, decoder: Decoder, dtype: torch.dtype, options: Options = DEFAULTS, operands: Operands | None = None
    ) -> None:
        """dtype: of activations. operands: of the convolutions, if they differ from that."""
        self.dtype = dtype
        operands = operands or Operands(dtype)
        up = Upsampler if options.composed_upsample else Expansion
        blocks = decoder.up_blocks
        self.conv_in = Conv.of(decoder.conv_in, operands)
        self.mid = [Resnet.of(r, operands) for r in decoder.mid_block.resnets]
        self.attention = Attention.of(decoder.mid_block.attentions[0], dtype, options.flash_attention)
        self.resnets = [[Resnet.of(r, operands) for r in b.resnets] for b in blocks]
        self.ups = [up.of(b.upsamplers[0], operands) for b in blocks if len(b.upsamplers)]
        self.norm_out = norm_of(decoder.conv_norm_out)
        self.conv_out = Output.of(decoder.conv_out, operands)
        self.groups = self.norm_out.groups
        self.nbytes = tensor_bytes(self)

    def plan(
        self, latents: int, height: int, width: int, frames: int, output: torch.dtype, device: torch.device,
        parking: Parking | None = None,
    ) -> Run:
        """A dry Run that knows its memory: chunks of `latents`, `frames` per step at 8x."""
        run = Run(self.dtype, device, parking)
        # Not the clip's start: from there on a latent is as many frames as it can be.
        run.done.update(latents=1, twice=1, frames=1)
        z = torch.empty(latents, height, width, self.conv_in.weight.channels, device="meta", dtype=self.dtype)
        self.chunk(run, z, frames, output, lambda pixels: None)
        return run

    def plan_front(self, latents: int, height: int, width: int, device: torch.device) -> Run:
        """A dry Run for `front_chunk`."""
        run = Run(self.dtype, device)
        z = torch.empty(latents, height, width, self.conv_in.weight.channels, device="meta", dtype=self.dtype)
        self.front_chunk(run, z, lambda features: None)
        return run

    def plan_tile(self, latents: int, height: int, width: int, frames: int, device: torch.device) -> Run:
        """A dry Run for `tile_chunk`; sizes of the tile."""
        run = Run(self.dtype, device)
        run.done.update(latents=1, twice=1, frames=1)
        x = torch.empty(latents, height, width, self.resnets[0][-1].out_channels, device="meta", dtype=self.dtype)
        self.tile_chunk(run, x, frames, lambda pixels: None)
        return run

    def chunk(self, run: Run, z: Tensor, frames: int, output: torch.dtype, emit: Callable[[Tensor], None]) -> None:
        """Decode latents [D, h, w, C] (any strides); `emit` gets pixels [m, 8h, 8w, 3], valid until it returns.

        frames: most frames per step at 8x (0: all of the chunk). Pixels are 0..1, or bytes 0..255.
        """
        form = BYTES if output == torch.uint8 else UNIT
        self._after_front(run, z.shape[:3], lambda: self._front(run, z), frames, output, form, emit)

    def front_chunk(self, run: Run, z: Tensor, emit: Callable[[Tensor], None]) -> None:
        """Only the part that must see the whole frame: `emit` gets features [D, h, w, C], valid until it returns."""
        with run.arena.scope():
            x = self._front(run, z)
            run.advance(*z.shape[1:3])
            if not run.dry:
                emit(x)

    def tile_chunk(self, run: Run, x: Tensor, frames: int, emit: Callable[[Tensor], None]) -> None:
        """Features [D, h, w, C] of a tile, contiguous -> float32 pixels as `chunk`, 0..1 but not clamped."""
        self._after_front(run, x.shape[:3], lambda: x, frames, torch.float32, UNCLAMPED, emit)

    def _after_front(
        self, run: Run, size: tuple[int, ...], front: Callable[[], Tensor], frames: int, output: torch.dtype,
        form: Pixels, emit: Callable[[Tensor], None],
    ) -> None:
        """2x for the whole chunk; 4x for as many of its frames as make a step at 8x, two at least; 8x by steps."""
        with run.arena.scope():
            x = self._twice(run, size, front)
            step = -(-frames // 2) or x.shape[0]
            for first in range(0, x.shape[0], step):
                with run.arena.scope():
                    y = self._four_times(run, x[first : first + step])
                    for part in y.split(frames or y.shape[0]):
                        self._full_size(run, part, output, form, emit)
                    run.advance(*y.shape[1:3])
            run.advance(*x.shape[1:3])
        run.done["latents"] += size[0]

    def _front(self, run: Run, z: Tensor) -> Tensor:
        """1x: [D, h, w, C] -> the input of the first upsampler."""
        d, h, w, _ = z.shape
        x = run.take(d, h, w, self.conv_in.weight.out_channels)
        sums = run.conv(self.conv_in, z, x, groups=self.groups)
        x, sums = resnet(run, self.mid[0], x, sums, self.groups)
        sums = run.attend(self.attention, x, sums)
        x, sums = resnet(run, self.mid[1], x, sums, self.groups)
        return resnets(run, self.resnets[0], x, sums, self.groups, measure=False)[0]

    def _twice(self, run: Run, size: tuple[int, ...], front: Callable[[], Tensor]) -> Tensor:
        """Up to 2x: D latents of h x w -> [F, 2h, 2w, C]. F = 2D, or 2D - 1 at the clip's start."""
        d, h, w = size
        first = run.done["latents"]
        x = run.take(2 * d - (first == 0), 2 * h, 2 * w, self.ups[0].out_channels)
        with run.arena.scope():
            sums = run.upsample(self.ups[0], front(), x, first, self.groups)
            run.advance(h, w)
        return resnets(run, self.resnets[1], x, sums, self.groups, measure=False)[0]

    def _four_times(self, run: Run, x: Tensor) -> Tensor:
        """Up to 4x: some frames at 2x -> [F, 2h, 2w, C]; twice the frames, one less at the clip's start."""
        n, h, w, _ = x.shape
        first, up = run.done["twice"], self.ups[1]
        size = 2 * n - (first == 0), 2 * h, 2 * w
        y = run.take(*size, self.resnets[2][-1].out_channels)
        with run.arena.scope():
            wide = y if self.resnets[2][0].shortcut is None else run.take(*size, up.out_channels)
            sums = run.upsample(up, x, wide, first, self.groups)
            run.done["twice"] += n
            return resnets(run, self.resnets[2], wide, sums, self.groups, out=y, measure=False)[0]

    def _full_size(
        self, run: Run, x: Tensor, output: torch.dtype, form: Pixels, emit: Callable[[Tensor], None]
    ) -> None:
        """8x for some frames of x at 4x."""
        m, h, w, _ = x.shape
        size = m, 2 * h, 2 * w
        with run.arena.scope():
            wide = run.take(*size, self.ups[2].out_channels)
            sums = run.upsample(self.ups[2], x, wide, run.done["frames"], self.groups)
            y, sums = resnets(run, self.resnets[3], wide, sums, self.groups, overwrite=True)
            pixels = run.arena.take((*size, 3), output)
            run.pixels(self.conv_out, y, self.norm_out, sums, pixels, form)
            run.advance(*size[1:])
            run.done["frames"] += m
            if not run.dry:
                emit(pixels)
