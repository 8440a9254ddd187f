"""SeedVR2's encoder on the fused operators."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.conv3d import Partials
from ..models.seedvr2 import Encoder
from ..optimize import DEFAULTS, Options
from ..precision.operands import Operands
from .blocks import resnet, resnets
from .parking import Parking
from .run import Run
from .weights import Attention, Conv, Downsampler, Resnet, norm_of, tensor_bytes


class FusedEncoder:
    """Packed weights and the order of steps. One FusedEncoder serves any number of Runs."""

    def __init__(
        self, encoder: Encoder, dtype: torch.dtype, options: Options = DEFAULTS, operands: Operands | None = None
    ) -> None:
        """dtype: of activations. operands: of the convolutions, if they differ from that."""
        self.dtype = dtype
        operands = operands or Operands(dtype)
        blocks = encoder.down_blocks
        self.conv_in = Conv.of(encoder.conv_in, operands)
        self.resnets = [[Resnet.of(r, operands) for r in b.resnets] for b in blocks]
        self.downs = [Downsampler.of(b.downsamplers[0], operands) for b in blocks if len(b.downsamplers)]
        self.mid = [Resnet.of(r, operands) for r in encoder.mid_block.resnets]
        self.attention = Attention.of(encoder.mid_block.attentions[0], dtype, options.flash_attention)
        self.norm_out = norm_of(encoder.conv_norm_out)
        self.conv_out = Conv.of(encoder.conv_out, operands)
        self.groups = self.norm_out.groups
        self.nbytes = tensor_bytes(self)

    def plan(
        self, latents: int, height: int, width: int, frames: int, device: torch.device, parking: Parking | None = None
    ) -> Run:
        """A dry Run that knows its memory: chunks of `latents`, `frames` per step at 8x; sizes in pixels."""
        run = Run(self.dtype, device, parking)
        run.done.update(frames=1)
        self.chunk(run, torch.empty(4 * latents, height, width, 3, device="meta", dtype=self.dtype), frames)
        return run

    def chunk(self, run: Run, video: Tensor, frames: int) -> Tensor:
        """Frames [F, H, W, 3] in -1..1 -> moments [T, h, w, 2C] in float32, valid until the next call.

        F is 1 + 4n at the clip's start and 4n later. frames: most frames per step at full size (0: all).
        """
        count, height, width, _ = video.shape
        starts = run.done["frames"] == 0
        sizes = [(height >> i, width >> i) for i in range(4)]
        half = (count + starts) // 2
        quarter = (half + starts) // 2
        with run.arena.scope():
            moments = run.arena.take((quarter, *sizes[3], self.conv_out.weight.out_channels), torch.float32)
            x1 = run.take(quarter, *sizes[3], self.downs[2].weight.out_channels)
            with run.arena.scope():
                x2 = run.take(half, *sizes[2], self.downs[1].weight.out_channels)
                with run.arena.scope():
                    x4 = run.take(count, *sizes[1], self.downs[0].weight.out_channels)
                    sums = self._full_size(run, video, x4, frames, starts)
                    x, _ = resnets(run, self.resnets[1], x4, sums, self.groups, measure=False)
                    sums = run.downsample(self.downs[1], x, x2, starts, self.groups)
                    run.advance(*sizes[1])
                x, _ = resnets(run, self.resnets[2], x2, sums, self.groups, measure=False)
                sums = run.downsample(self.downs[2], x, x1, starts, self.groups)
                run.advance(*sizes[2])
            self._latent_size(run, x1, sums, moments)
            run.advance(*sizes[3])
            run.inspect(moments)
        run.done["frames"] += count
        return moments

    def _full_size(self, run: Run, video: Tensor, out: Tensor, frames: int, starts: bool) -> Partials | None:
        """8x and its downsampler, some frames at a time."""
        count, height, width, _ = video.shape
        parts = []
        for first, end in run.walk.spans(count, frames):
            part = video[first:end]
            with run.arena.scope():
                x = run.take(*part.shape[:3], self.conv_in.weight.out_channels)
                sums = run.conv(self.conv_in, part, x, groups=self.groups)
                x, _ = resnets(run, self.resnets[0], x, sums, self.groups, measure=False)
                parts.append(run.downsample(self.downs[0], x, out[first:end], starts, self.groups))
                run.advance(height, width)
        if run.walk.open:  # whatever steps they were made in
            return run.walk.sums(out, self.groups)
        if run.dry:
            return None
        return Partials(run.attempt(torch.cat, [p.data for p in parts]), parts[0].span)

    def _latent_size(self, run: Run, x: Tensor, sums: Partials | None, moments: Tensor) -> None:
        x, sums = resnets(run, self.resnets[3], x, sums, self.groups)
        x, sums = resnet(run, self.mid[0], x, sums, self.groups)
        sums = run.attend(self.attention, x, sums)
        x, sums = resnet(run, self.mid[1], x, sums, self.groups)
        run.conv(self.conv_out, x, moments, self.norm_out, sums)
