"""Upsampling as one convolution: 1x1x1 expansion, pixel shuffle and causal 3x3x3 conv composed into one kernel per
output phase on the low-resolution input (2x2x2 taps where time doubles, 3x2x2 where it does not).

Along an axis that doubles, output 2n + p reads shuffled samples 2n + p - 1 .. 2n + p + 1, which come from two input
samples. In time the three taps end at the output frame, and a clip's first latent has only one sub-frame, so input
frames 0 and 1 get weights of their own ("folds").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..conv3d.types import Balance, Weight, padded_channels, quantise_rows
from ..precision import exact_math

# Per fold and temporal phase: conv tap in time -> (input tap 0 = frame t-1 or 1 = frame t, sub-frame of the expansion).
# Fold 0 has no second phase of its own: its one output is filed under phase 1, where the store expects it.
_TEMPORAL: tuple[tuple[tuple[tuple[int, int], ...] | None, ...], ...] = (
    (None, ((1, 0), (1, 0), (1, 0))),
    (((0, 0), (0, 0), (1, 0)), ((0, 0), (1, 0), (1, 1))),
    (((0, 0), (0, 1), (1, 0)), ((0, 1), (1, 0), (1, 1))),
)
_STILL = ((((0, 0), (1, 0), (2, 0)),),)


@dataclass(frozen=True)
class Composed:
    """weight: rows [sets * phases * K, taps * C]; bias: [sets * phases, 4, K] float32, the value inside and its
    increments on the border row, the border column and the corner (the shuffled frame is zero-padded after the
    expansion's bias, so taps outside lose that bias)."""

    weight: Weight
    bias: Tensor


def compose(expand: Tensor, expand_bias: Tensor, conv: Tensor, conv_bias: Tensor) -> tuple[Tensor, Tensor]:
    """expand [4 * z * C, C, 1, 1, 1], conv [K, C, 3, 3, 3] -> kernels [sets, phases, K, kt, 2, 2, C] and bias table
    [sets, phases, 4, K], in the dtype given. Phases in the expansion's own order, (row * 2 + column) * z + frame."""
    k, c = conv.shape[:2]
    z = expand.shape[0] // (4 * c)
    plans = _TEMPORAL if z == 2 else _STILL
    source = expand.view(2, 2, z, c, c)
    shuffled_bias = expand_bias.view(2, 2, z, c)
    kernels = conv.new_zeros(len(plans), 4 * z, k, 2 if z == 2 else 3, 2, 2, c)
    table = conv.new_zeros(len(plans), 4 * z, 4, k)
    if conv.is_meta:  # plans need the sizes; some 600 small operations for no values took most of a first plan
        return kernels, table
    with exact_math(conv.device):  # rounded once, at the end
        for iy in range(2):
            for ix in range(2):
                _compose_phase(iy, ix, plans, source, shuffled_bias, conv, conv_bias, kernels, table)
    return kernels, table


def _compose_phase(iy: int, ix: int, plans: tuple, source: Tensor, shuffled_bias: Tensor, conv: Tensor,
                   conv_bias: Tensor, kernels: Tensor, table: Tensor) -> None:
    z = source.shape[2]
    for jh in range(3):
        for jw in range(3):
            (ay, sy), (ax, sx) = divmod(iy - 1 + jh, 2), divmod(ix - 1 + jw, 2)
            ay, ax = ay + 1 - iy, ax + 1 - ix
            out_row, out_col = jh == 2 * iy, jw == 2 * ix  # outside where the output is at that border
            for jt in range(3):
                tap = conv[:, :, jt, jh, jw]
                products = [tap @ source[sy, sx, s] for s in range(z)]
                biases = [tap @ shuffled_bias[sy, sx, s] for s in range(z)]
                for fold, phases in enumerate(plans):
                    for it, plan in enumerate(phases):
                        if plan is None:
                            continue
                        at, s = plan[jt]
                        phase = (iy * 2 + ix) * z + it
                        kernels[fold, phase, :, at, ay, ax] += products[s]
                        row = table[fold, phase]
                        row[0] += biases[s]
                        if out_row:
                            row[1] -= biases[s]
                        if out_col:
                            row[2] -= biases[s]
                        if out_row and out_col:
                            row[3] += biases[s]
    for it in range(z):
        table[:, (iy * 2 + ix) * z + it, 0] += conv_bias


def pack(expand: Tensor, expand_bias: Tensor, conv: Tensor, conv_bias: Tensor, dtype: torch.dtype,
         balance: Balance | None = None) -> Composed:
    """Compose in fp32 and round once into `dtype` (8-bit types: one scale per row). Same arguments as `compose`.

    balance: scales of the input channels, folded into the composed weights before they are rounded.
    """
    kernels, table = compose(expand.float(), expand_bias.float(), conv.float(), conv_bias.float())
    folds, phases, k, kt, _, _, c = kernels.shape
    if balance is not None:
        kernels *= balance(kernels.view(folds * phases * k, -1, c))
    wide = padded_channels(c, dtype)
    rows = torch.nn.functional.pad(kernels, (0, wide - c))
    data, scale = quantise_rows(rows.view(folds * phases * k, -1), dtype, wide)
    sets = folds if folds > 1 else 0
    weight = Weight(data, wide, k, (kt, 2, 2), scale, (phases // 4, 2, 2), shifted=True, folded=sets)
    return Composed(weight, table.view(folds * phases, 4, k).contiguous())
