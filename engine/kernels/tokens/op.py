"""Passes over tokens. All take contiguous rows [R, D], and the result of a row does not depend on the others.

scales: float32 [R], where `out` is 8 bit wide: its rows are then divided by them. turn: columns of such rows that are
rotated together first, as those of a weight were; 0: none. There is no health flag: a value that
is not finite reaches the end, in 8 bit by way of its row's scale, which is then NaN. The exception is NaN in the
results of attention, which `rounded` makes 0. pairs: even columns of a product are gates of the odd ones, and its
result [R, N / 2] is SiLU of the former (0 for -inf) times the latter.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..descriptor import Descriptor
from ..launching import launcher
from ..operators import HALVES, Takes, operator
from ..targets import Target
from . import reference
from .reference import LIMITS
from .schedules import ATTENTION, GROUP, pick

#: Most rows whose int32 sums exist at once, and the step of their number.
SUM_ROWS, STEP = 1024, 16
#: Columns that may be rotated together.
TURNS = tuple(4**i for i in range(1, 8))
#: Sizes of heads that attention has a kernel for: a larger one's weights could overflow in fp16.
HEADS = (16, 32, 64)
#: Columns of one program, where it needs no sum over its row.
COLUMNS = 1024


def _check(x: Tensor, out: Tensor, scales: Tensor | None = None, *, turn: int = 0, **_: Any) -> None:
    if turn and (out.dtype not in LIMITS or turn not in TURNS or out.shape[1] % turn):
        raise ValueError(f"{out.dtype} rows of {out.shape[1]} are not rotated in groups of {turn}")
    if (out.dtype in LIMITS) != (scales is not None):
        raise ValueError(f"{out.dtype} rows {'need' if scales is None else 'have no'} scales")


@operator("normalised_kernel", reference=reference.normalised,
          check=lambda x, weight, eps, out, scales=None, **more: _check(x, out, scales, **more))  # fmt: skip
def normalised(
    here: Target, x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None = None, *,
    y: Tensor | None = None, scale: Tensor | None = None, turn: int = 0,
) -> None:  # fmt: skip
    """Normalise x: divide by the root of its mean square plus eps, multiply by weight [D], and write into out. y,
    scale: first add y * scale [D] to x in place."""
    launcher("tokens.normalised_kernel", here)[(x.shape[0],)](
        x, x if y is None else y, weight if scale is None else scale, weight, out, x if scales is None else scales,
        eps, D=x.shape[1], ADDS=y is not None, **_form(x.shape[1], turn, out.dtype),
    )  # fmt: skip


@operator("rotated_kernel", reference=reference.rotated)
def rotated(here: Target, qkv: Tensor, turns: Tensor, head: int, eps: float) -> None:
    """Normalise and rotate queries and keys in place.

    Args:
        qkv: [R, heads * 3 * head], of each head its query, key and value. Queries and keys are divided by the root of
            their mean square plus eps, then channels i and half + i of each are rotated.
        turns: [S, 2, half], cosines and sines; row r takes those of r % S.
    """
    heads, half = qkv.shape[1] // (3 * head), turns.shape[2]
    launcher("tokens.rotated_kernel", here)[(qkv.shape[0], 2)](
        qkv, turns, turns.shape[0], eps, HEADS=heads, HEAD=head, HALF=half, BH=_power(heads), BR=_power(half),
        BP=_power(max(head - 2 * half, 1)), num_warps=4,
    )  # fmt: skip


@operator("gated_kernel", reference=reference.gated, check=_check)
def gated(here: Target, x: Tensor, out: Tensor, scales: Tensor | None = None, *, turn: int = 0) -> None:
    """Write SiLU of x's first half (0 for -inf) times its second half: x [R, 2 D] -> out [R, D]."""
    d = out.shape[1]
    form = {"LIMIT": 0, "TURN": 0, "BLOCK": COLUMNS, "num_warps": 4} if scales is None else _form(d, turn, out.dtype)
    launcher("tokens.gated_kernel", here)[(x.shape[0], -(-d // form["BLOCK"]))](
        x, out, x if scales is None else scales, D=d, **form
    )


@operator("rounded_kernel", reference=reference.rounded, check=_check)
def rounded(
    here: Target, x: Tensor, out: Tensor, scales: Tensor | None = None, *, turn: int = 0, zeroed: bool = False
) -> None:
    """Write x into out, if `zeroed` with 0 for NaN."""
    launcher("tokens.rounded_kernel", here)[(x.shape[0],)](
        x, out, x if scales is None else scales, D=x.shape[1], ZEROED=zeroed,
        **_form(x.shape[1], turn, out.dtype),
    )  # fmt: skip


@operator("summed_kernel", reference=reference.summed)
def summed(
    here: Target, sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor, out: Tensor, *, pairs: bool = False,
    scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Write int32 sums [R, D] times rows [R] and columns [D], plus bias [D], into out; or with `scale` [D], add this
    times scale to out."""
    d = sums.shape[1]
    launcher("tokens.summed_kernel", here)[(sums.shape[0], -(-d // COLUMNS))](
        sums, rows, columns, bias, out, bias if scale is None else scale, D=d, BLOCK=COLUMNS, PAIRS=pairs,
        ADDS=scale is not None, num_warps=4,
    )  # fmt: skip


def _by_library(
    x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, bias: Tensor, out: Tensor, sums: Tensor, *,
    backend: str = "reference", **more: Any,
) -> None:  # fmt: skip
    """Multiply by the library, and give its sums to `summed`."""
    (r, _), n = x.shape, len(weight)
    for top in range(0, r, size := sum_rows(r)):
        part = slice(top, min(top + size, r))
        made = sums[: n * (part.stop - top)].view(-1, n)
        torch._int_mm(x[part], weight.t(), out=made)
        into = out[part]
        summed(made[: len(into)], rows[part][: len(into)], columns, bias, into, backend=backend, **more)


@operator("product_kernel", reference=_by_library)
def multiplied(
    here: Target, x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, bias: Tensor, out: Tensor, sums: Tensor, *,
    pairs: bool = False, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Write x [R, K] times weight [N, K], both int8, times rows [R] and columns [N], plus bias [N], into out [R, N]; or
    with `scale` [N], add this times scale to out. out may lack rows at the end.
    sums: int32, N for each of `sum_rows(R)`, for products without a kernel of their own."""
    n, k = weight.shape
    s = pick(here, n, k)
    if s is None:
        _by_library(x, weight, rows, columns, bias, out, sums, pairs=pairs, scale=scale, backend="triton")
        return
    operands = (Descriptor(t, [block, s.depth]) for t, block in ((x, s.positions), (weight, s.columns)))
    launcher("tokens.product_kernel", here)[(-(-len(out) // s.positions) * (n // s.columns),)](
        *operands, rows, columns, bias, out, bias if scale is None else scale, len(out), N=n, K=k, BM=s.positions,
        BN=s.columns, BK=s.depth, GROUP=GROUP, PAIRS=pairs, ADDS=scale is not None, num_warps=s.warps,
        num_stages=s.stages,
    )  # fmt: skip


@operator(
    "attended_kernel", reference=reference.attended, takes=Takes(*HALVES, has="tma", on=ATTENTION, head=HEADS),
    sizes=lambda qkv, tokens, head, out: {"head": head},
)  # fmt: skip
def attended(here: Target, qkv: Tensor, tokens: int, head: int, out: Tensor) -> None:
    """Write attention among all tokens of each tile into out [R, width], with 0 for NaN.

    Args:
        qkv: [R, heads * 3 * head], of each head its query, key and value, as `rotated` leaves them: each of the first
            two no longer than the root of `head`. On devices where `attends`.
        tokens: of a tile; R is a multiple of it.
    """
    (rows, width), s = out.shape, ATTENTION[here.sm]
    launcher("tokens.attended_kernel", here)[(rows // tokens * (width // head) * -(-tokens // s.queries),)](
        Descriptor(qkv, [s.queries, head]), Descriptor(qkv, [s.keys, head]), qkv, out, tokens,
        math.log2(math.e) / math.sqrt(head), HEADS=width // head, HEAD=head, BM=s.queries, BN=s.keys,
        num_warps=s.warps, num_stages=s.stages,
    )  # fmt: skip


def attends(x: Tensor, head: int, backend: str = "auto") -> bool:
    """Return whether `attended` has a kernel for heads of this size on x's device, in its type."""
    return attended.runs(x.device, x.dtype, backend, head=head)


def sum_rows(rows: int) -> int:
    """Return the rows that a product of so many, without a kernel of its own, takes at once: parts of nearly the same
    size, because libraries refuse few rows."""
    parts = -(-rows // SUM_ROWS)
    return -(-rows // parts // STEP) * STEP


@functools.cache
def _form(columns: int, turn: int, dtype: torch.dtype) -> dict[str, int]:
    """Return as constants how rows are stored in a type, and the block of a program that has a whole row."""
    block = _power(columns)
    return {"LIMIT": int(LIMITS.get(dtype, 0)), "TURN": turn, "BLOCK": block,
            "num_warps": min(max(block // (2048 if turn == 256 else 512), 1), 16)}  # fmt: skip


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
