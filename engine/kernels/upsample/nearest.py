"""Nearest-neighbour doubling and a 3x3 convolution as one convolution of the small frame: 2x2 taps per output phase.

Of three taps at output 2n + p two fall on the same input sample: for p = 0 the last two (inputs n - 1 and n), for p = 1
the first two (n and n + 1). Zeros around the doubled frame are zeros around the small one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..conv3d.types import Balance, Weight, pack_weight
from ..precision import exact_math

#: [phase, tap on the small frame, tap on the doubled one]
_FOLD = (((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))


def compose_nearest(conv: Tensor) -> Tensor:
    """conv [K, C, 3, 3] -> [4 * K, C, 1, 2, 2] in its type, phases (row, column) outermost."""
    fold = conv.new_tensor(_FOLD)
    with exact_math(conv.device):
        return torch.einsum("pai,qbj,kcij->pqkcab", fold, fold, conv).flatten(0, 2).unsqueeze(2)


def pack_nearest(
    conv: Tensor, bias: Tensor, dtype: torch.dtype, balance: Balance | None = None
) -> tuple[Weight, Tensor]:
    """Compose in fp32 and round once into `dtype`; the weight and its bias [4 * K] in float32. balance: scales of the
    input channels, as for `pack_weight`."""
    weight = pack_weight(compose_nearest(conv.float()), dtype, (1, 2, 2), balance=balance)
    return replace(weight, shifted=True), bias.float().repeat(4)
