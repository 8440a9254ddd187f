"""Types of a convolution: packed weights, geometry, epilogue; and its optional result, partial sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..targets import FP8

QUANT_MAX = {FP8: 448.0, torch.int8: 127.0}
#: The most fp8 products that are summed in fp16 at a time (a step's depth) before they go into fp32.
HALF_DEPTH = 64


@dataclass(frozen=True)
class Weight:
    """Packed weights.

    data: [sets * phases * K, taps * C] in the operand type, taps (t, y, x) outermost, C padded as the buffer is.
    scale: [K] float32 that turns the product back into real units (None: 1); includes nothing of the activation.
    phases: sub-outputs (t, y, x) per input position, in the order ((y * 2 + x) * phases[0] + t).
    folded: sets of rows where frames double (composed temporal upsampling): 3 for stream frames 0, 1 and 2+, 1 for all;
    the first one makes only its last sub-frame. 0: frames do not double.
    early: for clips whose history is copies of their first frame, the same convolution of the clip's frames 0 and 1,
    with one tap in time and with two (taps on the same frame summed), or nothing; `pieces` says when.
    tiles: in Winograd form; data of one dimension, as `winograd2d.pack_tiles` orders it.
    """

    data: Tensor
    channels: int
    out_channels: int
    kernel: tuple[int, int, int]
    scale: Tensor | None = None
    phases: tuple[int, int, int] = (1, 1, 1)
    shifted: bool = False  # taps of phase (., py, px) start py rows and px columns later (composed upsampling)
    folded: int = 0
    early: tuple[Weight, ...] = ()
    tiles: bool = False

    def pieces(self, first: int, frames: int) -> Iterator[tuple[Weight, int, int, int]]:
        """Yield the calls that make `frames` outputs, whose first one is frame `first` of its clip: one call, except
        for the frames that have weights of their own. Each is (weight, first frame, end, slots it starts later)."""
        at = 0
        while at < frames and first + at < len(self.early):
            yield self.early[first + at], at, at + 1, len(self.early) - first - at
            at += 1
        if at < frames:
            yield self, at, frames, 0

    def phase(self, number: int) -> Weight:
        """Return the rows of one phase alone."""
        if self.tiles:
            return replace(self, data=self.data.view(math.prod(self.phases), -1)[number], phases=(1, 1, 1))
        rows = slice(number * self.out_channels, (number + 1) * self.out_channels)
        scale = None if self.scale is None else self.scale[rows].contiguous()
        return replace(self, data=self.data[rows], scale=scale, phases=(1, 1, 1))

    @property
    def flops_per_position(self) -> int:
        """Return the operations of the convolution itself: the Winograd form needs four ninths of them."""
        return 2 * self.channels * self.out_channels * math.prod(self.phases) * self.taps

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.kernel[2]


def quantiser(dtype: torch.dtype, scale: float) -> Pixels:
    """Return the format in which an 8-bit type holds value / scale, saturated."""
    return Pixels(1.0 / scale, 0.0, -QUANT_MAX[dtype], QUANT_MAX[dtype])


def padded_channels(channels: int, dtype: torch.dtype) -> int:
    """Return the channels of the buffer: whole 32-byte rows, the least a matrix instruction and a bulk copy take."""
    step = 32 // dtype.itemsize
    return -(-channels // step) * step


def quantise_rows(rows: Tensor, dtype: torch.dtype, channels: int) -> tuple[Tensor, Tensor | None]:
    """Quantise [N, taps * channels] float32 to `dtype`; return it with its scale per row (None for 16-bit floating
    types).

    fp8 rows are kept so small that no step of HALF_DEPTH products with operands up to 448 sums to more than fp16 holds.
    """
    if dtype not in QUANT_MAX:
        return rows.to(dtype), None
    if rows.is_meta:
        return rows.to(dtype), rows.new_empty(len(rows))
    largest = rows.abs().amax(1).clamp_min(1e-12) / QUANT_MAX[dtype]
    scale = largest
    if dtype == FP8:
        # Halves of a step. Steps that do not divide the channels of a tap may begin at each of them.
        halves = torch.nn.functional.pad(rows.abs(), (0, HALF_DEPTH // 2)).unflatten(1, (-1, HALF_DEPTH // 2)).sum(2)
        steps = (halves[:, :-1] + halves[:, 1:])[:, :: 2 if channels % HALF_DEPTH == 0 else 1]
        limit = torch.finfo(torch.float16).max / QUANT_MAX[FP8]
        # Rounding to fp8 may add 1/16 to every term.
        scale = torch.maximum(largest, steps.amax(1) * (17 / 16 / limit))
    scaled = rows / scale[:, None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


#: From a convolution's rows [N, taps, C], float32, to the scale of each input channel [C]: operand = value / scale.
Balance = Callable[[Tensor], Tensor]


def pack_weight(weight: Tensor, dtype: torch.dtype, phases: tuple[int, int, int] = (1, 1, 1), early: bool = False,
                balance: Balance | None = None) -> Weight:
    """Pack a conv weight [N, C, kt, kh, kw] (N = phases * K); 8-bit types get one scale per row.

    With phases the N rows are pixel-shuffled by the store: row (phase * K + k) lands in channel k of its phase.

    Args:
        early: also pack the reduced forms of three taps in time for a clip's first two frames, for as many bytes again.
        balance: scales of the input channels, folded into the weights before they are rounded.
    """
    n, c = weight.shape[:2]
    kernel = tuple(weight.shape[2:])
    wide = torch.zeros(n, *kernel, padded_channels(c, dtype), device=weight.device, dtype=torch.float32)
    if balance is not None:
        weight = weight.float() * balance(weight.float().permute(0, 2, 3, 4, 1).flatten(1, 3))[:, None, None, None]
    wide[..., :c] = weight.float().permute(0, 2, 3, 4, 1)
    data, scale = quantise_rows(wide.flatten(1), dtype, wide.shape[-1])
    count = phases[0] * phases[1] * phases[2]
    first: tuple[Weight, ...] = ()
    if early:
        before, last = weight[:, :, :2].float().sum(2, keepdim=True), weight[:, :, 2:].float()
        first = pack_weight(before + last, dtype), pack_weight(torch.cat((before, last), 2), dtype)
    return Weight(data.contiguous(), wide.shape[-1], n // count, kernel, scale, phases, early=first)


@dataclass(frozen=True)
class Geometry:
    """The position of the taps: output (t, y, x) reads buffer frames t*st.., rows y*sh + oy.., columns x*sw + ox.."""

    stride: tuple[int, int, int] = (1, 1, 1)
    origin: tuple[int, int] = (0, 0)
    # A band of a taller frame: index of its first row, and the frame's rows (0: the buffer is the whole frame).
    first_row: int = 0
    frame_rows: int = 0


@dataclass(frozen=True)
class Pixels:
    """stored = clamp(value * gain + offset, low, high), rounded where the output type is an integer."""

    gain: float
    offset: float
    low: float
    high: float


@dataclass(frozen=True)
class Epilogue:
    """Operations on the accumulator before the one store.

    scale: activation scale (operand = real value / scale); the weight's own scale is applied too.
    bias: [K], or [phases * K] with phases, or the composed upsampler's [rows, 4, K] table; float32.
    residual: [D, H, W, K] view, added in fp32. groups: > 0 requests partial GroupNorm sums of the stored values.
    out_scale: an 8-bit result stores value / out_scale, saturated. pixels: overrides that with an output format.
    health: float32 [], set to NaN if a value was not finite where either of them clamps, which would hide it.
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    groups: int = 0
    scale: float = 1.0
    out_scale: float = 1.0
    half_accumulate: bool = False
    pixels: Pixels | None = None
    health: Tensor | None = None

    def format(self, dtype: torch.dtype) -> Pixels | None:
        """Return the affine map and clamp before the cast into `dtype`; None where there is only the cast."""
        if self.pixels is not None or dtype not in QUANT_MAX:
            return self.pixels
        return quantiser(dtype, self.out_scale)


@dataclass(frozen=True)
class Partials:
    """Sums and sums of squares of fixed blocks of positions: data [D, blocks, K / span, 2] float32.

    Blocks never depend on chunk or band, so concatenating the bands of a frame along dim 1 gives the frame's own.
    """

    data: Tensor
    span: int  # neighbouring channels summed together; divides the channels of a group

    @staticmethod
    def concat(parts: list[Partials], axis: int = 1) -> Partials:
        """Concatenate bands (axis 1) or frames (axis 0), in their order."""
        return Partials(torch.cat([p.data for p in parts], axis), parts[0].span)


def stat_span(channels: int, groups: int, block: int) -> int:
    """Return the largest power of two that divides both a group and the `block` channels one program holds."""
    per_group = channels // groups
    return min(per_group & -per_group, block)
