"""The fused products. All take contiguous rows [R, C] of one 16-bit type, and a row's result does not depend on the
others.

columns: float32 [N], the scales of an 8-bit weight's rows. Rows that it multiplies are then 8-bit codes of the same
type, with scales of their own: what is not finite makes a row's scale NaN, and so all that is made of the row.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .....kernels.descriptor import Descriptor
from .....kernels.launching import launcher
from .....kernels.operators import HALVES, Takes, operator
from .....kernels.targets import Target, interpreted, widened
from .....kernels.tokens import LIMITS
from . import reference
from .angles import Place, shares
from .schedules import FED, GROUP, WIDE, Schedule, narrow, pick

#: Channels that a program's rows may have, and those of a head.
_HEADS = (32, 64, 128)
_TAKES = Takes(*HALVES, width=(32, 64, 128, 256), head=_HEADS)
#: Rows [R, C], a weight [C, C] and a bias [C].
Product = tuple[Tensor, Tensor, Tensor]
#: Heads that one program turns.
TURNED = 64



def _width(x: Tensor, *_: Any, **__: Any) -> dict[str, int]:
    return {"width": x.shape[1]}


def fuses(width: int, head: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels take blocks of this width and head."""
    return _TAKES.why_not(dtype, width=width, head=head) is None


@operator(
    "projected_kernel", "narrow_projected_kernel", "gluon.wide_projected_kernel", reference=reference.projected,
    takes=_TAKES, in_place=True, sizes=lambda x, w, b, norms, *_, **__: {"width": x.shape[1], "head": norms.shape[1]},
)  # fmt: skip
def projected(
    here: Target, x: Tensor, weight: Tensor, bias: Tensor, norms: Tensor, table: Tensor, place: Place, eps: float,
    query: Tensor | None, keys: Tensor | None, *, columns: Tensor | None = None, schedule: Schedule | None = None,
) -> None:  # fmt: skip
    """Compute queries, keys and values of normalised tokens; normalise and rotate queries and keys.

    Rows of x are divided by the root of their mean square plus eps. So is each head of a query or key, which is then
    multiplied by its norm; channels 2 i and 2 i + 1 turn against each other.

    Args:
        x: [R, C].
        weight, bias: [3 C, C] and [3 C], for queries, keys and values; x's norm is part of the weight.
        norms: [2, head], of queries and keys.
        table: `angles` of at least as many positions as there are frames, rows and columns.
        place: of the tokens.
        query: result, [R, heads, head]; None if only keys are wanted.
        keys: result, keys and values, [R, 2, heads, head]; None if only queries are wanted.
        schedule: overrides the table (checks and tuning only).
    """
    heads, head = (keys if query is None else query).shape[-2:]
    one = keys if query is None else query if keys is None else None
    common = {"C": x.shape[1], "HEADS": heads, **_halves(head), "FIRST": heads if query is None else 0,
              "LAST": heads if keys is None else 3 * heads}
    rows = x.shape[0], *place, eps
    if here.wgmma and schedule is None and one is not None and _wide_heads(x, heads, head):
        launcher("blocks.wide_projected_kernel", here)[(-(-x.shape[0] // WIDE.rows),)](
            x, Descriptor(weight, [head, x.shape[1]]), x if columns is None else columns, bias, norms, table, one,
            *rows, **common, BM=WIDE.rows, STAGES=WIDE.stages * (2 // weight.itemsize),
            LIMIT=int(LIMITS.get(weight.dtype, 0)), num_warps=WIDE.warps, **_most(WIDE),
        )  # fmt: skip
        return
    s = schedule or (pick if columns is None else narrow)(here.sm)[0]
    more = {} if columns is None else {"LIMIT": int(LIMITS[weight.dtype])}
    launcher(f"blocks.{'narrow_' * bool(more)}projected_kernel", here)[(-(-x.shape[0] // s.rows),)](
        x, weight, *(() if columns is None else (columns,)), bias, norms, table, x if query is None else query,
        x if keys is None else keys, *rows, **common, UPCAST=widened(weight), BM=s.rows, num_warps=s.warps,
        num_stages=s.stages, **more, **_most(s),
    )  # fmt: skip


@operator(
    "turned_kernel", reference=reference.turned, takes=Takes(head=_HEADS), in_place=True,
    sizes=lambda x, *_: {"head": x.shape[2]},
)  # fmt: skip
def turned(here: Target, x: Tensor, bias: Tensor, norm: Tensor, table: Tensor, place: Place, eps: float) -> None:
    """Add a bias to queries or keys, normalise and rotate them in place, as `projected` does.

    Args:
        x: [R, heads, head], with any stride between tokens.
        bias, norm: [heads * head] and [head].
        table, place: as of `projected`.
    """
    launcher("blocks.turned_kernel", here)[(-(-x.shape[0] * x.shape[1] // TURNED),)](
        x, bias, norm, table, x.shape[0], *place, eps, HEADS=x.shape[1], TOKEN=x.stride(0), **_halves(x.shape[2]),
        BM=TURNED, num_warps=4,
    )  # fmt: skip


def _halves(head: int) -> dict[str, int]:
    of_frame, of_row, _ = shares(head)
    return {"HALF": head // 2, "OF_FRAME": of_frame, "OF_ROW": of_row}


@operator(
    "gated_kernel", "narrow_gated_kernel", "gluon.wide_gated_kernel", reference=reference.gated_product, takes=_TAKES,
    sizes=_width, in_place=True,
)  # fmt: skip
def gated_product(
    here: Target, x: Tensor, weight: Tensor, biases: Tensor | None, eps: float, out: Tensor, *,
    columns: Tensor | None = None, scales: Tensor | None = None, schedule: Schedule | None = None,
) -> None:  # fmt: skip
    """Write SiLU of one product of normalised tokens times another.

    Args:
        x: [R, C], divided by the root of its mean square plus eps.
        weight: [2 D, C], rows of the product in SiLU and of the other in turn; x's norm is part of it.
        biases: [2 D], likewise.
        out: [R, D], of the weight's type where that is in 8 bit.
        scales: float32 [R, D / GROUP], result: of such an `out`, for each GROUP columns of a row.
    """
    shapes = {"C": x.shape[1], "D": out.shape[1], "BIASED": biases is not None}
    if columns is not None:
        s = schedule or narrow(here.sm)[1]
        launcher("blocks.narrow_gated_kernel", here)[(-(-x.shape[0] // s.rows),)](
            x, weight, columns, x if biases is None else biases, out, scales, x.shape[0], eps, **shapes, GROUP=GROUP,
            LIMIT=int(LIMITS[out.dtype]), UPCAST=widened(weight), BM=s.rows, num_warps=s.warps, num_stages=s.stages,
            **_most(s),
        )  # fmt: skip
        return
    wide = schedule is None and here.wgmma and x.shape[1] >= 64 and out.shape[1] % WIDE.columns == 0
    s = WIDE if wide else schedule or pick(here.sm)[1]
    more = {} if wide else {"UPCAST": widened(x), "num_stages": s.stages}
    parts = Descriptor(weight, [s.columns, x.shape[1]]) if wide else weight
    launcher(f"blocks.{'wide_' * wide}gated_kernel", here)[(-(-x.shape[0] // s.rows),)](
        x, parts, x if biases is None else biases, out, x.shape[0], eps, **shapes, BM=s.rows, BN=s.columns,
        num_warps=s.warps, **more, **_most(s),
    )


@operator("added_kernel", "narrow_added_kernel", reference=reference.added, takes=_TAKES, sizes=_width, in_place=True)
def added(
    here: Target, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None,
    more: tuple[Tensor, Tensor] | None = None, *, columns: Tensor | None = None, scales: Tensor | None = None,
    schedule: Schedule | None = None,
) -> None:  # fmt: skip
    """Add y [R, K] times weight [C, K], plus bias [C], to x [R, C] in place.

    Args:
        more: another pair like y and weight, in 16 bit.
        scales: float32 [R, K / GROUP], of an 8-bit y, as `gated_product` writes them.
    """
    s = schedule or (pick if columns is None else narrow)(here.sm)[2]
    width = min(s.columns, x.shape[1])
    second, weights = (x, x) if more is None else more
    programs = -(-x.shape[0] // s.rows) * (x.shape[1] // width)
    eight = {} if columns is None else {"GROUP": GROUP, "UPCAST_MORE": widened(x)}
    operands = (y, weight) if columns is None else (y, scales, weight, columns)
    launcher(f"blocks.{'narrow_' * bool(eight)}added_kernel", here)[(programs,)](
        x, *operands, x if bias is None else bias, second, weights, x.shape[0], C=x.shape[1], K=y.shape[1],
        MORE=0 if more is None else second.shape[1], BIASED=bias is not None, UPCAST=widened(weight), BM=s.rows,
        BN=width, BK=min(s.depth, y.shape[1] if more is None else second.shape[1]), num_warps=s.warps,
        num_stages=s.stages, **eight, **_most(s),
    )  # fmt: skip


@operator(
    "feed.feed_kernel", reference=reference.feed_forward, in_place=True,
    takes=Takes(*HALVES, has="wgmma", width=(FED.width,), inner=range(FED.columns, 1 << 16, FED.columns)),
    sizes=lambda x, gates, biases, eps, down, *_, **__: {"width": x.shape[1], "inner": down.shape[1]},
)  # fmt: skip
def feed_forward(
    here: Target, x: Tensor, gates: Tensor, biases: Tensor | None, eps: float, down: Tensor,
    before: Product | None = None, more: Product | None = None,
) -> None:  # fmt: skip
    """Add to x what an MLP makes of it: `gated_product` and `added` in one, where `feeds` says so.

    Args:
        x: [R, C], which is changed.
        gates, biases: as weight and biases of `gated_product`.
        down: [C, D]; its columns are in the order of `turned_columns`.
        before: a product that is added to x first.
        more: a product that is added to x with the MLP's results.
    """
    (rows, c), s = x.shape, FED
    tiles = -(-rows // (2 * s.rows))
    (mixed, proj, proj_bias), (second, weights, bias) = ((x, down, x) if t is None else t for t in (before, more))
    launcher("blocks.feed_kernel", here)[(min(tiles, _processors(x.device)),)](
        Descriptor(x, [s.rows, c]), Descriptor(mixed, [s.rows, s.deep]), Descriptor(proj, [c, s.columns]), proj_bias,
        Descriptor(gates, [2 * s.columns, s.deep]), x if biases is None else biases, Descriptor(down, [c, s.columns]),
        Descriptor(second, [s.rows, s.deep]), Descriptor(weights, [c, s.columns]), bias, tiles, eps, C=c,
        D=down.shape[1], BIASED=biases is not None, MIXED=before is not None, MORE=more is not None, SLOTS=s.slots,
        num_warps=4,
    )  # fmt: skip


def feeds(width: int, inner: int, device: torch.device) -> bool:
    """Return whether one kernel runs all products of a block after its attention here, for an MLP of these widths."""
    return feed_forward.runs(device, HALVES[0], width=width, inner=inner)


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the number of a GPU's processors; that of an H200 for meta tensors."""
    return 132 if device.type == "meta" else torch.cuda.get_device_properties(device).multi_processor_count


def turned_columns(down: Tensor) -> Tensor:
    """Return a weight's columns in the order of `feed_forward`: of each eight, the first four and the others in
    turn."""
    return down.unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1)


def _wide_heads(x: Tensor, heads: int, head: int) -> bool:
    """Return whether the kernel for wgmma takes heads of this size and number."""
    return head == WIDE.columns and x.shape[1] == heads * head >= 128


def _most(s: Schedule) -> dict[str, int]:
    return {"maxnreg": s.registers} if s.registers and not interpreted() else {}
