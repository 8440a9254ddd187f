"""SeedVR2's decoder on the fused operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.to_pixels import Pixels
from ..models.seedvr2 import Decoder
from ..optimize import DEFAULTS, Options
from ..precision.operands import Operands
from .blocks import resnet, resnets
from .run import Run
from .staged import StagedDecoder
from .weights import Attention, Conv, Expansion, Output, Resnet, Upsampler, norm_of, tensor_bytes


class FusedDecoder(StagedDecoder):
    """Packed weights and the order of steps.

    Each step's sums for the next norm come from the epilogue that stored the values, so no tensor is read only to be
    measured (except once after attention).
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
        self.latent_channels = decoder.conv_in.in_channels
        self.features = self.resnets[0][-1].out_channels
        self.nbytes = tensor_bytes(self)

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
