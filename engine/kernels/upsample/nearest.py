"""Nearest-neighbour doubling and a 3x3 convolution as one convolution of the small frame: 2x2 taps per output phase.

Of three taps at output 2n + p two fall on the same input sample: for p = 0 the last two (inputs n - 1 and n), for p = 1
the first two (n and n + 1). Zeros around the doubled frame are zeros around the small one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..conv3d.types import Balance, Weight, pack_weight, padded_channels
from ..conv3d.winograd.planes import phase_planes, quantise_planes
from ..precision import exact_math

#: [phase, tap on the small frame, tap on the doubled one]
_FOLD = (((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))


def compose_nearest(conv: Tensor) -> Tensor:
    """conv [K, C, 3, 3] -> [4 * K, C, 1, 2, 2] in its type, phases (row, column) outermost."""
    fold = conv.new_tensor(_FOLD)
    with exact_math(conv.device):
        return torch.einsum("pai,qbj,kcij->pqkcab", fold, fold, conv).flatten(0, 2).unsqueeze(2)


def pack_nearest(
    conv: Tensor, bias: Tensor, dtype: torch.dtype, balance: Balance | None = None, winograd: bool = False
) -> tuple[Weight, Tensor]:
    """Compose in fp32 and round once into `dtype`; the weight and its bias [4 * K] in float32. balance: scales of the
    input channels, as for `pack_weight`. winograd: for buffers of planes, with a quarter fewer products."""
    kernels = compose_nearest(conv.float())
    if not winograd:
        return replace(pack_weight(kernels, dtype, (1, 2, 2), balance=balance), shifted=True), bias.float().repeat(4)
    k, c = conv.shape[:2]
    wide = padded_channels(c, dtype)
    rows = kernels.permute(0, 2, 3, 4, 1)  # [4 * K, 1, 2, 2, C]
    if balance is not None:
        rows = rows * balance(rows.flatten(1, 3))
    rows = torch.nn.functional.pad(rows, (0, wide - c)).unflatten(0, (4, k))
    data, scale, mix = quantise_planes(phase_planes(rows), dtype, wide)
    weight = Weight(data, wide, k, (1, 2, 2), scale, (1, 2, 2), shifted=True, winograd=True, mix=mix)
    return weight, bias.float().repeat(4)
