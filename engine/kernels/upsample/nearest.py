"""Nearest-neighbour doubling and a convolution as one convolution of the small frame: 2 taps for 3 along each axis that
doubles, per output phase.

Of three taps at output 2n + p two fall on the same input sample: for p = 0 the last two (inputs n - 1 and n), for p = 1
the first two (n and n + 1). Zeros around the doubled frame are zeros around the small one, and its edge's copies copies
of that one's. In time taps end at the output, and a clip's first frame does not double: of inputs n - 1 and n, the two
first taps fall on n - 1 for p = 0, the two last on n for p = 1, which is the first frame's only output.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..conv3d.types import Balance, Weight, pack_weight
from ..precision import exact_math

#: [phase, tap on the small frame, tap on the doubled one]
_FOLD = (((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))
#: The same for time.
_LATE = (_FOLD[1], _FOLD[0])


def compose_nearest(conv: Tensor, temporal: bool = False) -> Tensor:
    """Compose conv [K, C, kt, 3, 3] into [4 * z * K, C, kt', 2, 2] in its type, phases (row, column, frame) outermost:
    z and kt' are 2 where frames double too (and kt is 3), else 1 and kt."""
    fold = conv.new_tensor(_FOLD)
    kept = torch.eye(conv.shape[2], dtype=torch.float32, device="cpu").to(conv)[None]
    late = conv.new_tensor(_LATE) if temporal else kept
    with exact_math(conv.device):
        chosen = torch.einsum("pai,qbj,rel->pqreablij", fold, fold, late)
        return torch.einsum("pqreablij,kclij->pqrkceab", chosen, conv).flatten(0, 3)  # as in compose.py


def pack_nearest(
    conv: Tensor, bias: Tensor, dtype: torch.dtype, balance: Balance | None = None, temporal: bool = False
) -> tuple[Weight, Tensor]:
    """Compose in fp32 and round once into `dtype`; return the weight and its bias for each phase, in float32. balance:
    scales of the input channels, as for `pack_weight`."""
    z, kernels = 2 if temporal else 1, compose_nearest(conv.float(), temporal)
    weight = pack_weight(kernels, dtype, (z, 2, 2), balance=balance)
    return replace(weight, shifted=True, folded=int(temporal)), bias.float().repeat(4 * z)
