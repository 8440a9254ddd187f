"""Repeat channels into the samples that a position becomes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launching import launcher
from ..operators import operator, strides_of
from ..targets import Target

ELEMENTS = 4096  # of one program
WARPS = 4


def _check(x: Tensor, out: Tensor, *, frames: int = 1, drop: int = 0, **_: bool) -> None:
    d, h, w, c = x.shape
    f, rows, columns, k = out.shape
    if (f, rows, columns) != (frames * d - drop, 2 * h, 2 * w) or 4 * frames * k % c or not 0 <= drop < frames:
        raise ValueError(f"duplicate of {list(x.shape)} cannot fill {list(out.shape)} (frames {frames}, drop {drop})")
    if x.stride(3) != 1 or out.stride(3) != 1 or x.dtype != out.dtype:
        raise ValueError("duplicate takes tensors of one type with unit channel stride")


def _reference(x: Tensor, out: Tensor, *, frames: int = 1, drop: int = 0, samples_first: bool = False) -> None:
    k, samples = out.shape[3], 4 * frames
    each = k * samples // x.shape[3]
    channels = torch.arange(k, device=x.device)
    for p in range(samples):
        frame, row, column = p // 4, p // 2 % 2, p % 2
        source = x[int(frame < drop) :]
        target = out[(frame - drop) % frames :: frames, row::2, column::2]
        taken = p * k + channels if samples_first else channels * samples + p
        target.copy_(source.index_select(3, taken // each))


@operator("duplicate_kernel", reference=_reference, check=_check)
def duplicate(here: Target, x: Tensor, out: Tensor, *, frames: int = 1, drop: int = 0,
              samples_first: bool = False) -> None:
    """Repeat every channel of x into the samples that a position becomes.

    With p = (frame * 2 + row) * 2 + column, the channel of x that becomes k is, for `each` = 4 * frames * K / C, (p * K
    + k) // each with `samples_first`, else (k * 4 * frames + p) // each.

    Args:
        x: [D, H, W, C].
        out: [frames * D - drop, 2H, 2W, K], of the same type, channels next to each other; C divides 4 * frames * K.
        frames: the frames that one becomes, 1 or 2.
        drop: frames of the first one's that are left out.

    Raises:
        ValueError: other shapes.
    """
    _, h, w, c = x.shape
    f, rows, columns, k = out.shape
    if not f:
        return
    wide = 1 << max(k - 1, 1).bit_length()
    block = max(ELEMENTS // wide, 1)
    unit, strides = strides_of(x, out)
    launcher("duplicate.duplicate_kernel", here)[(-(-rows * columns // block), f)](
        x, out, h, w, drop, *strides, K=k, EACH=4 * frames * k // c, FRAMES=frames,
        SAMPLES_FIRST=samples_first, UNIT=unit, KP=wide, BP=block, num_warps=WARPS,
    )  # fmt: skip
