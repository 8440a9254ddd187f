"""Passes over tokens: kernels where there are some, else torch. All take contiguous rows [R, D], and the result of a
row does not depend on the others.

scales: float32 [R], where `out` is 8 bit wide: its rows are then divided by them. turn: columns of such rows that are
rotated together first, as those of a weight were; 0: none. There is no health flag: a value that
is not finite reaches the end, in 8 bit by way of its row's scale, which is then NaN. The exception is NaN in the
results of attention, which `rounded` makes 0. pairs: even columns of a product are gates of the odd ones, and its
result [R, N / 2] is SiLU of the former (0 for -inf) times the latter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..descriptor import Descriptor
from ..launching import launcher
from ..observe import observed
from ..targets import FP8, kernels_for, on_device
from . import reference
from .schedules import ATTENTION, GROUP, pick

#: The largest number of an 8-bit type; the largest value of a row is scaled to it.
LIMITS = {FP8: 448.0, torch.int8: 127.0}
#: Most rows whose int32 sums exist at once, and the step of their number.
SUM_ROWS, STEP = 1024, 16
#: Columns that may be rotated together.
TURNS = tuple(4**i for i in range(1, 8))
#: Sizes of heads that attention has a kernel for: a larger one's weights could overflow in fp16.
HEADS = (16, 32, 64)
#: Columns of one program, where it needs no sum over its row.
COLUMNS = 1024


@observed
def normalised(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None = None, *, y: Tensor | None = None,
    scale: Tensor | None = None, turn: int = 0, backend: str = "auto",
) -> None:  # fmt: skip
    """Normalise x: divide by the root of its mean square plus eps, multiply by weight [D], and write into out. y,
    scale: first add y * scale [D] to x in place."""
    limit = _limit(out, scales, turn)
    here = kernels_for(x.device, backend)
    if here is None:
        reference.normalised(x, weight, eps, out, scales, limit, y, scale, turn)
        return
    with on_device(x):
        launcher("tokens.normalised_kernel", here)[(x.shape[0],)](
            x, x if y is None else y, weight if scale is None else scale, weight, out, x if scales is None else scales,
            eps, D=x.shape[1], ADDS=y is not None, LIMIT=int(limit), TURN=turn, **_block(x.shape[1], turn),
        )  # fmt: skip


@observed
def rotated(qkv: Tensor, turns: Tensor, head: int, eps: float, *, backend: str = "auto") -> None:
    """Normalise and rotate queries and keys in place.

    Args:
        qkv: [R, heads * 3 * head], of each head its query, key and value. Queries and keys are divided by the root of
            their mean square plus eps, then channels i and half + i of each are rotated.
        turns: [S, 2, half], cosines and sines; row r takes those of r % S.
    """
    here = kernels_for(qkv.device, backend)
    if here is None:
        reference.rotated(qkv, turns, head, eps)
        return
    heads, half = qkv.shape[1] // (3 * head), turns.shape[2]
    with on_device(qkv):
        launcher("tokens.rotated_kernel", here)[(qkv.shape[0], 2)](
            qkv, turns, turns.shape[0], eps, HEADS=heads, HEAD=head, HALF=half, BH=_power(heads), BR=_power(half),
            BP=_power(max(head - 2 * half, 1)), num_warps=4,
        )  # fmt: skip


@observed
def gated(x: Tensor, out: Tensor, scales: Tensor | None = None, *, turn: int = 0, backend: str = "auto") -> None:
    """Write SiLU of x's first half (0 for -inf) times its second half: x [R, 2 D] -> out [R, D]."""
    limit = _limit(out, scales, turn)
    here = kernels_for(x.device, backend)
    if here is None:
        reference.gated(x, out, scales, limit, turn)
        return
    d = out.shape[1]
    block = _block(d, turn) if limit else {"BLOCK": COLUMNS, "num_warps": 4}
    with on_device(x):
        launcher("tokens.gated_kernel", here)[(x.shape[0], -(-d // block["BLOCK"]))](
            x, out, x if scales is None else scales, D=d, LIMIT=int(limit), TURN=turn, **block
        )


@observed
def rounded(
    x: Tensor, out: Tensor, scales: Tensor | None = None, *, turn: int = 0, zeroed: bool = False, backend: str = "auto"
) -> None:
    """Write x into out, if `zeroed` with 0 for NaN."""
    limit = _limit(out, scales, turn)
    here = kernels_for(x.device, backend)
    if here is None:
        reference.rounded(x, out, scales, limit, turn, zeroed)
        return
    with on_device(x):
        launcher("tokens.rounded_kernel", here)[(x.shape[0],)](
            x, out, x if scales is None else scales, D=x.shape[1], LIMIT=int(limit), TURN=turn, ZEROED=zeroed,
            **_block(x.shape[1], turn),
        )  # fmt: skip


@observed
def summed(
    sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor, out: Tensor, *, pairs: bool = False,
    scale: Tensor | None = None, backend: str = "auto",
) -> None:  # fmt: skip
    """Write int32 sums [R, D] times rows [R] and columns [D], plus bias [D], into out; or with `scale` [D], add this
    times scale to out."""
    here = kernels_for(sums.device, backend)
    if here is None:
        reference.summed(sums, rows, columns, bias, out, pairs, scale)
        return
    d = sums.shape[1]
    with on_device(sums):
        launcher("tokens.summed_kernel", here)[(sums.shape[0], -(-d // COLUMNS))](
            sums, rows, columns, bias, out, bias if scale is None else scale, D=d, BLOCK=COLUMNS, PAIRS=pairs,
            ADDS=scale is not None, num_warps=4,
        )  # fmt: skip


@observed
def multiplied(
    x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, bias: Tensor, out: Tensor, sums: Tensor, *,
    pairs: bool = False, scale: Tensor | None = None, backend: str = "auto",
) -> None:  # fmt: skip
    """Write x [R, K] times weight [N, K], both int8, times rows [R] and columns [N], plus bias [N], into out [R, N]; or
    with `scale` [N], add this times scale to out. out may lack rows at the end.
    sums: int32, N for each of `sum_rows(R)`, for products without a kernel of their own."""
    here = kernels_for(x.device, backend)
    (r, k), n = x.shape, len(weight)
    s = None if here is None else pick(here, n, k)
    if s is None:
        for top in range(0, r, size := sum_rows(r)):
            part = slice(top, min(top + size, r))
            made = sums[: n * (part.stop - top)].view(-1, n)
            torch._int_mm(x[part], weight.t(), out=made)
            into = out[part]
            summed(made[: len(into)], rows[part][: len(into)], columns, bias, into, pairs=pairs, scale=scale,
                   backend=backend)  # fmt: skip
        return
    with on_device(x):
        operands = (Descriptor(t, [block, s.depth]) for t, block in ((x, s.rows), (weight, s.columns)))
        launcher("tokens.product_kernel", here)[(-(-len(out) // s.rows) * (n // s.columns),)](
            *operands, rows, columns, bias, out, bias if scale is None else scale, len(out), N=n, K=k, BM=s.rows,
            BN=s.columns, BK=s.depth, GROUP=GROUP, PAIRS=pairs, ADDS=scale is not None, num_warps=s.warps,
            num_stages=s.stages,
        )  # fmt: skip


def attends(x: Tensor, head: int, backend: str = "auto") -> bool:
    """Return whether `attended` has a kernel for heads of this size on x's device, in its type."""
    here = kernels_for(x.device, backend) if x.dtype in (torch.float16, torch.bfloat16) else None
    return here is not None and here.tma and here.sm in ATTENTION and head in HEADS


@observed
def attended(qkv: Tensor, tokens: int, head: int, out: Tensor, *, backend: str = "auto") -> None:
    """Write attention among all tokens of each tile into out [R, width], with 0 for NaN.

    Args:
        qkv: [R, heads * 3 * head], of each head its query, key and value, as `rotated` leaves them: each of the first
            two no longer than the root of `head`. On devices where `attends`.
        tokens: of a tile; R is a multiple of it.
    """
    here = kernels_for(qkv.device, backend)
    if here is None:
        reference.attended(qkv, tokens, head, out)
        return
    (rows, width), s = out.shape, ATTENTION[here.sm]
    with on_device(qkv):
        launcher("tokens.attended_kernel", here)[(rows // tokens * (width // head) * -(-tokens // s.queries),)](
            Descriptor(qkv, [s.queries, head]), Descriptor(qkv, [s.keys, head]), qkv, out, tokens,
            math.log2(math.e) / math.sqrt(head), HEADS=width // head, HEAD=head, BM=s.queries, BN=s.keys,
            num_warps=s.warps, num_stages=s.stages,
        )  # fmt: skip


def sum_rows(rows: int) -> int:
    """Return the rows that a product of so many, without a kernel of its own, takes at once: parts of nearly the same
    size, because libraries refuse few rows."""
    parts = -(-rows // SUM_ROWS)
    return -(-rows // parts // STEP) * STEP


def _limit(out: Tensor, scales: Tensor | None, turn: int) -> float:
    """Return the largest number of an 8-bit `out`, else 0. Raises ValueError where scales are missing, or given but not
    needed, or columns are to be rotated that are not in 8 bit or no power of 4."""
    if turn and (out.dtype not in LIMITS or turn not in TURNS or out.shape[1] % turn):
        raise ValueError(f"{out.dtype} rows of {out.shape[1]} are not rotated in groups of {turn}")
    if (out.dtype in LIMITS) != (scales is not None):
        raise ValueError(f"{out.dtype} rows {'need' if scales is None else 'have no'} scales")
    return LIMITS.get(out.dtype, 0.0)


def _block(columns: int, turn: int) -> dict[str, int]:
    """Return the block of a program that has a whole row."""
    block = _power(columns)
    return {"BLOCK": block, "num_warps": min(max(block // (2048 if turn == 256 else 512), 1), 16)}


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
