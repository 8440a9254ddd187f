"""Weights of the form, in the order in which the kernel of `ptx.py` copies and reads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..types import Weight
from .algebra import SLOTS, SWEEPS
from .form import DEPTH, KINDS

#: Fewest input channels of a layer that takes this form: with fewer, beginnings and ends of blocks are most of it.
NARROWEST = 64


def takes(dtype: torch.dtype, channels: int, out_channels: int) -> bool:
    """Return True if a layer has this form where that is switched on. It depends on its widths and the type of its
    operands only: the same for any frame and chunk."""
    return dtype in KINDS and channels >= NARROWEST and channels % DEPTH == 0 and warps(out_channels) is not None


def warps(out_channels: int) -> tuple[int, int] | None:
    """Return the output channels of a warp, and how many warps lie beside each other; None: no blocks divide them."""
    widths = {128: (64, 2), 96: (48, 2), 64: (64, 1)}
    return next((found for width, found in widths.items() if out_channels % width == 0), None)


def _transformed(taps: Tensor, axis: int) -> tuple[Tensor, ...]:
    """Return the weights of a line's four products, of three taps along an axis."""
    g0, g1, g2 = taps.unbind(axis)
    return g0, (g0 + g1 + g2) * 0.5, (g0 - g1 + g2) * 0.5, g2


def pack_tiles(weight: Tensor, dtype: torch.dtype, phases: tuple[int, int, int] = (1, 1, 1),
               early: bool = False) -> Weight:  # fmt: skip
    """Pack a conv weight [N, C, kt, 3, 3] (N = phases * K) whose type and widths the form `takes`, computed in float32
    and rounded once.

    Its data has one dimension: for each block of channels, sweep, frame and step of sixteen channels what one step
    copies, which is for each warp beside the other, slot and sixteen channels the registers of each thread, 16 bytes.

    Args:
        phases, early: as for `pack_weight`; each phase is computed by itself.
    """
    n, c, depth = weight.shape[:3]
    k = n // math.prod(phases)
    per_warp, wide = warps(k) or (0, 0)
    if not per_warp:
        raise ValueError(f"{k} output channels have no Winograd form in registers")
    # [q][p]; no more of them than a row is in float32 at a time.
    u = [[one.to(dtype) for one in _transformed(row, 3)] for row in _transformed(weight.float(), 3)]
    slots = torch.stack([u[s.q][s.p] for sweep in SWEEPS for s in sweep]).permute(0, 3, 1, 2)
    parts = slots.reshape(_shape(n, c, depth, per_warp, wide))
    first: tuple[Weight, ...] = ()
    if early:
        before, last = weight[:, :, :2].float().sum(2, keepdim=True), weight[:, :, 2:].float()
        first = tuple(pack_tiles(part, dtype) for part in (before + last, torch.cat((before, last), 2)))
    data = parts.permute(_ORDER).reshape(-1).contiguous()
    return Weight(data, c, k, (depth, 3, 3), phases=phases, early=first, tiles=True)


def unpacked(weight: Weight) -> Tensor:
    """Return a packed weight as [sweep, slot, kt, K, C]."""
    k, c, depth = weight.out_channels, weight.channels, weight.kernel[0]
    shape = _shape(k, c, depth, *(warps(k) or (0, 0)))
    parts = weight.data.view([shape[axis] for axis in _ORDER])
    return parts.permute([_ORDER.index(axis) for axis in range(len(shape))]).reshape(len(SWEEPS), SLOTS, depth, k, c)


def _shape(k: int, c: int, depth: int, per_warp: int, wide: int) -> tuple[int, ...]:
    """Return [sweep, slot, kt, K, C] taken apart. K: block, warp, thread, pair of eights, eight, value; a thread's
    channels are neighbours, two of each of the products' blocks of eight. C: step, half, thread, value."""
    many = k // (per_warp * wide)
    return len(SWEEPS), SLOTS, depth, many, wide, 4, per_warp // 16, 2, 2, c // DEPTH, 2, 4, 2


#: The axes of `_shape` in the order of memory.
_ORDER = (3, 0, 2, 9, 4, 1, 6, 5, 8, 11, 7, 10, 12)
