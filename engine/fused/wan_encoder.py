"""Wan's encoders on the fused operators."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.conv3d import Epilogue, Geometry, conv3d
from ..models.wan import Encoder
from ..optimize import DEFAULTS, Options
from ..precision.operands import Operands
from .blocks import resnet, resnets
from .parking import Parking
from .run import COPY, Run
from .wan_weights import Average, Down, DownLevel, Linear
from .weights import Attention, Conv, Resnet, norm_of, tensor_bytes


class FusedWanEncoder:
    """Packed weights and the order of steps. One of them serves any number of Runs."""

    def __init__(
        self, encoder: Encoder, dtype: torch.dtype, options: Options = DEFAULTS, operands: Operands | None = None
    ) -> None:
        """dtype: of activations. operands: of the convolutions, if they differ from that."""
        self.dtype = dtype
        operands = operands or Operands(dtype)
        self.patch = encoder.patch
        self.conv_in = Conv.of(encoder.conv1, operands)
        self.levels = [DownLevel.of(level, operands) for level in encoder.levels]
        first, attention, last = encoder.middle
        self.mid = [Resnet.of(r, operands) for r in (first, last)]
        self.attention = Attention.of(attention, dtype, options.flash_attention)
        self.norm_out = norm_of(encoder.head["0"])
        self.conv_out = Conv.of(encoder.head["2"], operands)
        self.moments = Linear.of(encoder.at_latent[0])
        self.nbytes = tensor_bytes(self)

    def plan(
        self, latents: int, height: int, width: int, frames: int, device: torch.device, parking: Parking | None = None
    ) -> Run:
        """A dry Run that knows its memory: chunks of `latents`, `frames` per step at full size; sizes in pixels."""
        run = Run(self.dtype, device, parking, head="zero")
        run.done.update(frames=1)
        self.chunk(run, torch.empty(4 * latents, height, width, 3, device="meta", dtype=self.dtype), frames)
        return run

    def chunk(self, run: Run, video: Tensor, frames: int) -> Tensor:
        """Frames [F, H, W, 3] in -1..1 -> moments [T, h, w, 2C] in float32, valid until the next call.

        F is 1 + 4n at the clip's start and 4n later. frames: most frames per step at full size (0: all).
        """
        count = video.shape[0]
        starts = run.done["frames"] == 0
        height, width = (n // (8 * self.patch) * 8 if self.patch == 2 else n for n in video.shape[1:3])
        half = (count + starts) // 2
        quarter = (half + starts) // 2
        sizes = [
            (f, height >> i, width >> i) for i, f in enumerate((count, count, half, quarter))
        ]
        channels = self.moments.bias.numel()
        with run.arena.scope():
            result = run.arena.take((*sizes[3], channels), torch.float32)
            x = run.take(*sizes[3], self.levels[2].out_channels)
            with run.arena.scope():
                x2 = run.take(*sizes[2], self.levels[1].out_channels)
                with run.arena.scope():
                    x4 = run.take(*sizes[1], self.levels[0].out_channels)
                    self._full_size(run, video, x4, frames)
                    _level(run, self.levels[1], x4, x2, starts)
                _level(run, self.levels[2], x2, x, starts)
            self._latent_size(run, x, result)
            run.inspect(result)
        run.done["frames"] += count
        return result

    def _full_size(self, run: Run, video: Tensor, out: Tensor, frames: int) -> None:
        """The first level, some frames at a time."""
        height, width = (2 * n for n in out.shape[1:3]) if self.patch == 2 else video.shape[1:3]
        for a, b in run.walk.spans(video.shape[0], frames):
            part, target = video[a:b], out[a:b]
            with run.arena.scope():
                x = run.take(part.shape[0], height, width, self.conv_in.weight.out_channels)
                with run.arena.scope():
                    if self.patch == 2:
                        blocks = run.arena.take((part.shape[0], height, width, 12), torch.float32)
                        part = _patches(part, blocks)
                    run.conv(self.conv_in, part, x)
                _level(run, self.levels[0], x, target, False)

    def _latent_size(self, run: Run, x: Tensor, result: Tensor) -> None:
        level = self.levels[3]
        with run.arena.scope():
            around = None
            if level.average is not None:
                around = run.take(*x.shape[:3], level.out_channels)
                _average(run, level.average, x, around, False)
            y, _ = resnets(run, level.resnets, x, None, 0)
            if around is not None:
                y.add_(around)
            resnet(run, self.mid[0], y, None, 0)
            run.attend(self.attention, y, None)
            y, _ = resnet(run, self.mid[1], y, None, 0)
            moments = run.arena.take(tuple(result.shape), torch.float32)
            run.conv(self.conv_out, y, moments, self.norm_out)
            run.advance(*x.shape[1:3])
            if not run.dry:
                self.moments(moments, result)


def _patches(video: Tensor, out: Tensor) -> Tensor:
    """[F, H, W, 3] -> out [F, H / 2, W / 2, 12], channel (c * 2 + column) * 2 + row; what fills no block is cut off."""
    f, h, w, _ = out.shape
    blocks = video[:, : 2 * h, : 2 * w].unflatten(2, (w, 2)).unflatten(1, (h, 2)).permute(0, 1, 3, 5, 4, 2)
    out.view(f, h, w, 3, 2, 2).copy_(blocks)
    return out


def _level(run: Run, level: DownLevel, x: Tensor, out: Tensor, starts: bool) -> None:
    """x [F, H, W, C], overwritten, through a level's resnets and downsampler into out. `starts`: the clip begins here,
    where the level halves frames."""
    with run.arena.scope():
        if level.average is not None:
            _average(run, level.average, x, out, starts)
        y, _ = resnets(run, level.resnets, x, None, 0)
        _downsample(run, level.down, y, out, starts, level.average is not None)
    run.advance(*x.shape[1:3])


def _downsample(run: Run, down: Down, x: Tensor, out: Tensor, starts: bool, add: bool) -> None:
    """x [F, H, W, C] to out at half the size (and frame rate), or onto what is there (`add`)."""
    # The zero row and column lie below and to the right: taps start inside the border.
    geometry = Geometry(stride=(down.factor, 2, 2), origin=(1, 1))
    lead = int(starts and down.factor == 2)
    for i in run.inputs(down, x, COPY, None, out.shape[1], geometry):
        rows = i.rows(out)
        # A stride of 2 in time leaves one frame of history, and the clip's start none.
        start = (i.start + (2 if lead else down.factor - 1)) % i.data.shape[0]
        for conv, part in ((down.lead, rows[:lead]), (down, rows[lead:])):
            if part.shape[0]:
                epilogue = Epilogue(bias=conv.bias, residual=part if add else None)
                run.attempt(conv3d, i.data, conv.weight, part, geometry=i.geometry, epilogue=epilogue, start=start)


def _average(run: Run, average: Average, x: Tensor, out: Tensor, starts: bool) -> None:
    """x [F, H, W, C] to the means that lie in `out` before the level's own result is added."""
    if run.dry:
        return
    geometry = Geometry(stride=average.stride)
    lead = int(starts and average.stride[0] == 2)
    for weight, source, target in ((average.lead, x[:lead], out[:lead]), (average.weight, x[lead:], out[lead:])):
        if target.shape[0]:
            run.attempt(conv3d, source, weight, target, geometry=geometry)
