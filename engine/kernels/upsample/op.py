"""Upsampling as one convolution: 1x1x1 expansion, pixel shuffle and causal 3x3x3 conv composed into one kernel per
output phase on the low-resolution input (2x2x2 taps where time doubles, 3x2x2 where it does not).

Along an axis that doubles, output 2n + p reads shuffled samples 2n + p - 1 .. 2n + p + 1, which come from two input
samples. In time the three taps end at the output frame, and a clip's first latent has only one sub-frame, so input
frames 0 and 1 get weights of their own ("folds").

Nearest-neighbour doubling and a convolution become one of the small frame likewise: 2 taps for 3 along each axis that
doubles. Of three taps at output 2n + p two fall on the same input sample: for p = 0 the last two (inputs n - 1 and n),
for p = 1 the first two (n and n + 1). Zeros around the doubled frame are zeros around the small one, and its edge's
copies copies of that one's. In time taps end at the output, and a clip's first frame does not double: of inputs n - 1
and n, the two first taps fall on n - 1 for p = 0, the two last on n for p = 1, which is the first frame's only output.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..conv3d import Balance, Epilogue, Geometry, Partials, Weight, conv3d, pack_weight, padded_channels
from ..conv3d.types import quantise_rows
from ..precision import exact_math

# Per fold and temporal phase: conv tap in time -> (input tap 0 = frame t-1 or 1 = frame t, sub-frame of the expansion).
# Fold 0 has no second phase of its own: its one output is filed under phase 1, where the store expects it.
_TEMPORAL: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = (
    ((), ((1, 0), (1, 0), (1, 0))),
    (((0, 0), (0, 0), (1, 0)), ((0, 0), (1, 0), (1, 1))),
    (((0, 0), (0, 1), (1, 0)), ((0, 1), (1, 0), (1, 1))),
)
_STILL = ((((0, 0), (1, 0), (2, 0)),),)
#: Of nearest-neighbour doubling: [phase, tap on the small frame, tap on the doubled one]
_FOLD = (((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))
#: The same for time.
_LATE = (_FOLD[1], _FOLD[0])
_WHOLE = Geometry()


@dataclass(frozen=True)
class Composed:
    """Composed weights. weight: rows [sets * phases * K, taps * C]; bias: [sets * phases, 4, K] float32, the value
    inside and its increments on the border row, the border column and the corner (the shuffled frame is zero-padded
    after the expansion's bias, so taps outside lose that bias)."""

    weight: Weight
    bias: Tensor


def compose(expand: Tensor, expand_bias: Tensor, conv: Tensor, conv_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compose expand [4 * z * C, C, 1, 1, 1] and conv [K, C, 3, 3, 3] into kernels [sets, phases, K, kt, 2, 2, C] and a
    bias table [sets, phases, 4, K], in the dtype given. Phases are in the expansion's own order, (row * 2 + column) * z
    + frame."""
    k, c = conv.shape[:2]
    z = expand.shape[0] // (4 * c)
    source, shuffled_bias = expand.view(2, 2, z, c, c), expand_bias.view(2, 2, z, c)
    time, space = (taps.to(conv) for taps in (_in_time(z), _in_space()))
    folds, _, kt = time.shape[:3]
    kernels = conv.new_zeros(folds, 2, 2, z, k, kt, 2, 2, c)
    table = conv.new_zeros(folds, 2, 2, z, 2, 2, k)
    if not conv.is_meta:  # plans need the sizes only
        taps = conv.permute(2, 3, 4, 0, 1).contiguous()
        # Rounded once, at the end. Sums of values have two operands: with more, another library decides their order.
        with exact_math(conv.device):
            for y, x, s in itertools.product(range(2), range(2), range(z)):
                at = time[..., s, :], space[..., y, :], space[..., x, :]
                chosen = torch.einsum("fnau,eibv,gjdw->fijngeabduvw", *at)
                kernels += torch.einsum("fijnabduvw,uvwkc->fijnkabdc", chosen[:, :, :, :, 0, 0], taps @ source[y, x, s])
                at_borders = chosen.sum((6, 7, 8))
                table += torch.einsum("fijngeuvw,uvwk->fijngek", at_borders, taps @ shuffled_bias[y, x, s])
            table[..., 0, 0, :] += conv_bias
    return kernels.flatten(1, 3), table.flatten(4, 5).flatten(1, 3)


def _in_time(z: int) -> Tensor:
    """Return 1 where a convolution's tap in time reads an input tap's sub-frame, else 0: [fold, phase, input tap,
    sub-frame, tap]."""
    plans = _TEMPORAL if z == 2 else _STILL
    taken = torch.zeros(len(plans), z, 2 if z == 2 else 3, z, 3, dtype=torch.float32, device="cpu")
    for fold, phases in enumerate(plans):
        for phase, plan in enumerate(phases):
            for tap, (at, s) in enumerate(plan):
                taken[fold, phase, at, s, tap] = 1
    return taken


def _in_space() -> Tensor:
    """Return the same along rows or columns, and with -1 for the tap that is outside where the output is at that
    border: [inside or border, phase, input tap, sub-sample, tap]."""
    taken = torch.zeros(2, 2, 2, 2, 3, dtype=torch.float32, device="cpu")
    for phase, tap in itertools.product(range(2), range(3)):
        at, s = divmod(phase - 1 + tap, 2)
        taken[0, phase, at + 1 - phase, s, tap] = 1
        if tap == 2 * phase:
            taken[1, phase, at + 1 - phase, s, tap] = -1
    return taken


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


def compose_nearest(conv: Tensor, temporal: bool = False) -> Tensor:
    """Compose conv [K, C, kt, 3, 3] into [4 * z * K, C, kt', 2, 2] in its type, phases (row, column, frame) outermost:
    z and kt' are 2 where frames double too (and kt is 3), else 1 and kt."""
    fold = conv.new_tensor(_FOLD)
    kept = torch.eye(conv.shape[2], dtype=torch.float32, device="cpu").to(conv)[None]
    late = conv.new_tensor(_LATE) if temporal else kept
    with exact_math(conv.device):
        chosen = torch.einsum("pai,qbj,rel->pqreablij", fold, fold, late)
        return torch.einsum("pqreablij,kclij->pqrkceab", chosen, conv).flatten(0, 3)  # as in `compose`


def pack_nearest(
    conv: Tensor, bias: Tensor, dtype: torch.dtype, balance: Balance | None = None, temporal: bool = False
) -> tuple[Weight, Tensor]:
    """Compose in fp32 and round once into `dtype`; return the weight and its bias for each phase, in float32. balance:
    scales of the input channels, as for `pack_weight`."""
    z, kernels = 2 if temporal else 1, compose_nearest(conv.float(), temporal)
    weight = pack_weight(kernels, dtype, (z, 2, 2), balance=balance)
    return replace(weight, shifted=True, folded=int(temporal)), bias.float().repeat(4 * z)


def upsample(x: Tensor, composed: Composed, out: Tensor, *, first: int, groups: int = 0, scale: float = 1.0,
             half_accumulate: bool = False, start: int = 0, geometry: Geometry = _WHOLE,
             backend: str = "auto") -> Partials | None:
    """Double rows and columns, and frames too where the weights are temporal.

    Args:
        x: zero-bordered [slots, H + 2, W + 2, C]; one frame of history where time doubles, else two (copies of the
            first frame when a clip starts).
        out: [F, 2H, 2W, K]: F = D where time stays, 2D, or 2D - 1 in the call that holds the clip's first frame (first
            == 0).
        first: index of x's first new frame within the clip.
        geometry: for a band of rows its place in the frame, since the bias differs at the frame's own edges.
    """
    epilogue = Epilogue(bias=composed.bias, groups=groups, scale=scale, half_accumulate=half_accumulate)
    return conv3d(x, composed.weight, out, geometry=geometry, epilogue=epilogue, start=start, first=first,
                  backend=backend)
