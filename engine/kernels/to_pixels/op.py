"""The last 3x3x3 convolution, stored as finished pixels: the output formats, and two passes over bands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..conv3d import Epilogue, Pixels, Weight, conv3d
from ..descriptor import Descriptor
from ..launching import launcher
from ..operators import HALVES, Takes, operator
from ..targets import Target, widened
from .schedules import GATHER_POSITIONS, SCRATCH_BYTES, pick

UNIT = Pixels(0.5, 0.5, 0.0, 1.0)  # [-1, 1] -> [0, 1]
BYTES = Pixels(127.5, 127.5, 0.0, 255.0)
RAW = Pixels(1.0, 0.0, float("-inf"), float("inf"))
COLUMNS = 32  # 9 * 3 shifted outputs, rounded up
MOST_OUTPUTS = 3


def columns_weight(weight: Weight) -> Tensor:
    """Repack a conv weight [K, kt * 9 * C] as [blocks * 32, C]: rows (y, x, k) of each temporal tap; four blocks where
    there are three taps, since tiles are powers of two."""
    k, (kt, _, _) = weight.out_channels, weight.kernel
    rows = weight.data.view(k, kt, 9, weight.channels).permute(1, 2, 0, 3).reshape(kt, 9 * k, weight.channels)
    packed = rows.new_zeros(4 if kt == 3 else 1, COLUMNS, weight.channels)
    packed[:kt, : 9 * k] = rows
    return packed.flatten(0, 1)


def scratch_floats(frames: int, height: int, width: int, outputs: int) -> int:
    """Return the number of partial products that one call keeps at once."""
    return frames * 9 * outputs * (min(_band(frames, height, width + 2, outputs), height) + 2) * (width + 2)


def _band(frames: int, height: int, pitch: int, outputs: int) -> int:
    return max(min(height, SCRATCH_BYTES // (frames * 9 * outputs * 4 * pitch) - 2), 16)


def _check(x: Tensor, weight: Weight, bias: Tensor, out: Tensor, **_: Any) -> None:
    d, h, w, k = out.shape
    kt = weight.kernel[0]
    if weight.kernel[1:] != (3, 3) or kt not in (1, 3) or weight.phases != (1, 1, 1) or k != weight.out_channels:
        raise ValueError(f"to_pixels takes one 3x3x3 or 1x3x3 kernel with {k} outputs, not {weight.kernel}")
    if x.shape[1] < h + 2 or x.shape[2] < w + 2 or d + kt - 1 > x.shape[0] or not x.is_contiguous():
        raise ValueError(f"to_pixels cannot fill {list(out.shape)} from {list(x.shape)}")
    if out.stride(3) != 1 or x.shape[3] != weight.channels or x.dtype != weight.data.dtype:
        raise ValueError("to_pixels needs unit channel stride and a weight of the buffer's type and channels")


def _reference(x: Tensor, weight: Weight, bias: Tensor, out: Tensor, *, pixels: Pixels = UNIT, start: int = 0,
               health: Tensor | None = None, **_: Tensor | None) -> None:
    """Frame by frame, so that the fp32 copies stay small."""
    epilogue = Epilogue(bias=bias, pixels=pixels, health=health)
    for d in range(out.shape[0]):
        conv3d.reference(x, weight, out[d : d + 1], epilogue=epilogue, start=(start + d) % x.shape[0])


@operator("columns_kernel", "gather_kernel", reference=_reference, check=_check, takes=Takes(*HALVES))
def to_pixels(here: Target, x: Tensor, weight: Weight, bias: Tensor, out: Tensor, *, pixels: Pixels = UNIT,
              start: int = 0, packed: Tensor | None = None, scratch: Tensor | None = None,
              health: Tensor | None = None) -> None:
    """Convolve bordered frames and store pixels, band by band where the scratch would be large.

    Args:
        x: [slots, H + 2, W + 2, C] fp16 or bf16, read from slot `start` on as conv3d does.
        weight: kernel (3|1, 3, 3).
        bias: [K] float32.
        out: [D, H, W, K] in float32, float16 or uint8, unit channel stride.
        packed: `columns_weight(weight)`, kept by callers that run more than once.
        scratch: float32, `scratch_floats` of it; allocated where there is none.
        health: float32 [], set to NaN if a value was not finite before it was clamped.

    Raises:
        ValueError: other shapes.
    """
    d, h, w, k = out.shape
    if k > MOST_OUTPUTS:  # wide enough for the implicit GEMM
        epilogue = Epilogue(bias=bias, pixels=pixels, health=health)
        conv3d(x, weight, out, epilogue=epilogue, start=start, backend="triton")
        return
    pitch, plane, c, kt = x.shape[2], x.shape[1] * x.shape[2], x.shape[3], weight.kernel[0]
    packed = columns_weight(weight) if packed is None else packed
    s = pick(here, c, kt)
    a: Any = x
    b: Any = packed
    if here.tma:
        rows = x.view(-1, c)
        a = Descriptor(rows, [s.positions, s.depth])
        b = Descriptor(packed, [s.columns, s.depth])
    band = _band(d, h, pitch, k)
    needed = d * 9 * k * (min(band, h) + 2) * pitch
    if scratch is None or scratch.numel() < needed:
        scratch = torch.empty(needed, dtype=torch.float32, device=x.device)
    for top in range(0, h, band):
        n = min(band, h - top)
        count = (n + 2) * pitch
        launcher("to_pixels.columns_kernel", here)[(-(-count // s.positions),)](
            a, b, scratch, x.shape[0], start, plane, top * pitch, count, d, C=c, N=9 * k, KT=kt, TMA=here.tma,
            UPCAST=widened(x),
            BM=s.positions, BN=COLUMNS, BK=s.depth, num_warps=s.warps, num_stages=s.stages,
        )  # fmt: skip
        part = out[:, top : top + n]
        launcher("to_pixels.gather_kernel", here)[(-(-n * w // GATHER_POSITIONS), d)](
            scratch, bias, part, bias if health is None else health, count, pitch, n, w, *part.stride()[:3],
            pixels.gain, pixels.offset, pixels.low, pixels.high, K=k, ROUND=out.dtype == torch.uint8,
            HEALTH=health is not None, BP=GATHER_POSITIONS, num_warps=4,
        )  # fmt: skip
