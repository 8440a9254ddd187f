"""Wan's decoders on the fused operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.conv3d import Epilogue, Geometry, conv3d, padded_channels
from ..kernels.conv3d.types import QUANT_MAX, quantiser
from ..kernels.norm_act import Store, norm_act
from ..kernels.to_pixels import Pixels
from ..models.wan import Decoder
from ..optimize import DEFAULTS, Options
from ..precision.operands import Operands
from .blocks import resnet, resnets
from .run import COPY, Run
from .staged import StagedDecoder
from .wan_weights import Linear, Up, UpLevel
from .weights import Attention, Conv, Output, Resnet, norm_of, tensor_bytes


class FusedWanDecoder(StagedDecoder):
    """Packed weights and the order of steps. Norms look at one position at a time, so nothing is summed."""

    head = "zero"

    def __init__(
        self, decoder: Decoder, dtype: torch.dtype, options: Options = DEFAULTS, operands: Operands | None = None
    ) -> None:
        """dtype: of activations. operands: of the convolutions, if they differ from that."""
        self.dtype = dtype
        operands = operands or Operands(dtype)
        self.patch = decoder.patch
        self.latent = Linear.of(decoder.at_latent[0])
        self.conv_in = Conv.of(decoder.conv1, operands)
        first, attention, last = decoder.middle
        self.mid = [Resnet.of(r, operands) for r in (first, last)]
        self.attention = Attention.of(attention, dtype, options.flash_attention)
        self.levels = [UpLevel.of(level, operands, options.composed_upsample) for level in decoder.levels]
        self.norm_out = norm_of(decoder.head["0"])
        self.conv_out = (Output if self.patch == 1 else Conv).of(decoder.head["2"], operands)
        self.latent_channels = decoder.conv1.in_channels
        self.features = self.conv_in.weight.out_channels
        self.nbytes = tensor_bytes(self)

    def _front(self, run: Run, z: Tensor) -> Tensor:
        """1x: the middle's result."""
        size = z.shape[:3]
        x = run.take(*size, self.features)
        with run.arena.scope():
            mixed = run.arena.take((*size, self.latent_channels), torch.float32)
            if not run.dry:
                self.latent(z.float(), mixed)
            run.conv(self.conv_in, mixed, x)
        resnet(run, self.mid[0], x, None, 0)
        run.attend(self.attention, x, None)
        return resnet(run, self.mid[1], x, None, 0)[0]

    def _twice(self, run: Run, size: tuple[int, ...], front: Callable[[], Tensor]) -> Tensor:
        d, h, w = size
        starts = run.done["latents"] == 0
        out = run.take(2 * d - starts, 2 * h, 2 * w, self.levels[0].up.out_channels)
        with run.arena.scope():
            _level(run, self.levels[0], front(), out, starts)
            run.advance(h, w)
        return out

    def _four_times(self, run: Run, x: Tensor) -> Tensor:
        n, h, w, _ = x.shape
        starts = run.done["twice"] == 0
        out = run.take(2 * n - starts, 2 * h, 2 * w, self.levels[1].up.out_channels)
        with run.arena.scope():
            _level(run, self.levels[1], x, out, starts)
            run.advance(h, w)
        run.done["twice"] += n
        return out

    def _full_size(
        self, run: Run, x: Tensor, output: torch.dtype, form: Pixels, emit: Callable[[Tensor], None]
    ) -> None:
        m, h, w, _ = x.shape
        size = m, 2 * h, 2 * w
        with run.arena.scope():
            wide = run.take(*size, self.levels[2].up.out_channels)
            with run.arena.scope():
                _level(run, self.levels[2], x, wide, False)
                run.advance(h, w)
            y, _ = resnets(run, self.levels[3].resnets, wide, None, 0)
            pixels = self._pixels(run, y, output, form)
            run.advance(*size[1:])
            run.done["frames"] += m
            if not run.dry:
                emit(pixels)

    def _pixels(self, run: Run, y: Tensor, output: torch.dtype, form: Pixels) -> Tensor:
        m, h, w, _ = y.shape
        if self.patch == 1:
            pixels = run.arena.take((m, h, w, 3), output)
            run.pixels(self.conv_out, y, self.norm_out, None, pixels, form)
            return pixels
        pixels = run.arena.take((m, 2 * h, 2 * w, 3), output)
        blocks = run.arena.take((m, h, w, 12), output)
        run.conv(self.conv_out, y, blocks, self.norm_out, pixels=form)
        # Channel (c * 2 + column) * 2 + row.
        pixels.view(m, h, 2, w, 2, 3).copy_(blocks.view(m, h, w, 3, 2, 2).permute(0, 1, 5, 2, 4, 3))
        return pixels


def _level(run: Run, level: UpLevel, x: Tensor, out: Tensor, starts: bool) -> None:
    """x [D, H, W, C], overwritten, through a level's resnets and upsampler into out [F, 2H, 2W, K]."""
    if level.shortcut and not run.dry:
        duplicate_up(x, out, level.up.time is not None, starts)
    with run.arena.scope():
        x, _ = resnets(run, level.resnets, x, None, 0)
        _upsample(run, level.up, x, out, starts, level.shortcut)


def _upsample(run: Run, up: Up, x: Tensor, out: Tensor, starts: bool, add: bool) -> None:
    """x [D, H, W, C], overwritten, to out [F, 2H, 2W, K] or onto what is there (`add`)."""
    h, w, c = x.shape[1:]
    lead, f, space = int(starts), out.shape[0], up.space
    if up.composed:
        buffer, inside = _bordered(run, f, h, w, c, space.dtype)
        copied = x if up.time is None else x[:lead]
        if copied.shape[0] and not run.dry:
            store = Store(silu=False, scale=space.scale, gain=space.gain)
            run.attempt(norm_act, copied, COPY, buffer[: copied.shape[0]], store=store, health=run.health)
        if up.time is not None:
            _double_frames(run, up.time, x, inside, lead, space.scale)
    else:
        frames = x
        if up.time is not None:
            frames = run.take(f, h, w, c)
            frames[:lead].copy_(x[:lead])
            _double_frames(run, up.time, x, frames, lead)
        buffer, inside = _bordered(run, f, 2 * h, 2 * w, c, space.dtype)
        inside.unflatten(1, (h, 2)).unflatten(3, (w, 2)).copy_(frames[:, :, None, :, None])
    if not run.dry:
        if run.watch is not None:
            run.watch(space, inside)
        epilogue = Epilogue(bias=space.bias, residual=out if add else None, scale=space.scale,
                            half_accumulate=space.half_accumulate)  # fmt: skip
        run.attempt(conv3d, buffer, space.weight, out, epilogue=epilogue)


def _double_frames(run: Run, time: Conv, x: Tensor, out: Tensor, lead: int, scale: float = 1.0) -> None:
    """x [D, H, W, C], overwritten, to out [2D, H, W, C] behind its first `lead` frames. lead 1: the clip's start, whose
    first frame passes by, and the convolution finds zeros in its place. scale: of an `out` in 8 bit."""
    x[:lead].zero_()
    pixels = quantiser(out.dtype, scale) if out.dtype in QUANT_MAX else None
    run.conv(time, x, out[lead:], geometry=Geometry(origin=(1, 1)), skip=lead, pixels=pixels)


def _bordered(run: Run, f: int, h: int, w: int, c: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An operand buffer [f, h + 2, w + 2, C padded], zero outside its inside [f, h, w, c]."""
    buffer = run.arena.take((f, h + 2, w + 2, padded_channels(c, dtype)), dtype)
    for edge in (buffer[:, 0], buffer[:, -1], buffer[:, :, 0], buffer[:, :, -1], buffer[..., c:]):
        edge.zero_()
    return buffer, buffer[:, 1:-1, 1:-1, :c]


def duplicate_up(x: Tensor, out: Tensor, temporal: bool, starts: bool) -> None:
    """Wan 2.2's shortcut around an upsampling level: x [D, H, W, C] -> out [F, 2H, 2W, K], K dividing C.

    Of its 4 or 8 samples, number p = (frame * 2 + row) * 2 + column of channel k is channel (k + p / samples) * C / K.
    """
    z, step = (2 if temporal else 1), x.shape[3] // out.shape[3]
    lead = int(starts and temporal)
    for p in range(4 * z):
        frame, row, column = p // 4, p // 2 % 2, p % 2
        # A clip's first frame has only its last copy.
        source = x[lead:] if frame == 0 else x
        first = (frame + lead) % z
        out[first::z, row::2, column::2].copy_(source[..., p * step // (4 * z) :: step])
