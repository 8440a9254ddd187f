"""Attention of every token to the tokens around it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.launching import launcher
from .....kernels.operators import HALVES, Takes, operator
from .....kernels.targets import Target, widened
from .schedules import LONGEST, WIDE, WIDE_TILE, Schedule, pick, wide_fits
from .windows import TERMS, Window, hidden, regions, whole

#: Rows and columns of queries that share a region of keys in the reference: keys are copied 5 times for a window of
#: 11x11.
TILE = (8, 8)
LOG2E = math.log2(math.e)
#: The largest bound of logits, in powers of two, under which the least weight of a softmax is still a normal bf16.
LARGEST_PEAK = 60.0
#: Size of a head for which the kernel for wgmma exists, and its registers: with these, three
#: programs run on a processor.
WIDE_HEAD, REGISTERS = 64, 168


def _check(q: Tensor, k: Tensor, v: Tensor, window: Window, **_: Any) -> None:
    alike = k.shape == v.shape and k.stride() == v.stride() and q.dtype == k.dtype == v.dtype
    if not alike or q.shape[1:] != k.shape[1:]:
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ValueError(f"neighbourhood needs queries and keys of one size and type, not {shapes}")


def _reference(
    q: Tensor, k: Tensor, v: Tensor, window: Window, *, ring: int = 0, out: Tensor | None = None, **_: Any
) -> Tensor:
    """In the type of q, a row of tiles at a time; memory grows with a row's keys."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if q.is_meta:
        return out
    frames, height, width = q.shape[:3]
    _, *inside = window.within(height, width)
    tall, wide = (min(t + k - 1, n) for t, k, n in zip(TILE, inside, (height, width), strict=True))
    r = regions(height, width, tuple(inside), TILE, (tall, wide))
    down, across = r.grid
    columns = _places(width, TILE[1], wide, inside[1], across, q.device)
    queries = (torch.arange(across * TILE[1], device=q.device)).clamp(max=width - 1)
    above, beside = (t[kinds].to(q.device) for t, kinds in ((r.rows, r.down), (r.columns, r.across)))
    for frame in range(frames):
        slots = [(f + ring) % k.shape[0] for f in window.frames(window.first + frame)]
        for i in range(down):
            top = max(min(i * TILE[0] - inside[0] // 2, height - tall), 0)
            rows = range(i * TILE[0], min((i + 1) * TILE[0], height))
            query = q[frame, rows.start : rows.stop][:, queries].unflatten(1, (across, TILE[1]))
            query = query.permute(1, 3, 0, 2, 4).flatten(2, 3)
            keys, values = (
                t[slots, top : top + tall][:, :, columns].permute(2, 4, 0, 1, 3, 5).flatten(2, 4) for t in (k, v)
            )
            seen = above[i, None, : len(rows), None, :, None] & beside[:, None, :, None, :]
            seen = seen.flatten(3).flatten(1, 2)[:, None].repeat(1, 1, 1, len(slots))
            found = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=1.0)
            found = found.unflatten(2, (len(rows), TILE[1])).permute(2, 0, 3, 1, 4).flatten(1, 2)
            out[frame, rows.start : rows.stop] = found[:, :width]
    return out


def _places(length: int, tile: int, size: int, kernel: int, tiles: int, device: torch.device) -> Tensor:
    """Return the keys along one axis of every tile's region, [tiles, size]."""
    first = torch.arange(tiles, device=device)[:, None] * tile - kernel // 2
    return first.clamp(max=length - size).clamp_(min=0) + torch.arange(size, device=device)


@operator(
    "neighbourhood_kernel", "gluon.wide_neighbourhood_kernel", reference=_reference, check=_check,
    takes=Takes(*HALVES, head=(16, 32, 64, 128), window=range(1, LONGEST + 1)),
    sizes=lambda q, k, v, window, **_: {"head": q.shape[4], "window": max(window.kernel)},
)  # fmt: skip
def neighbourhood(
    here: Target, q: Tensor, k: Tensor, v: Tensor, window: Window, *, ring: int = 0, bound: float = math.inf,
    out: Tensor | None = None, schedule: Schedule | None = None,
) -> Tensor:  # fmt: skip
    """Attend from every query to the keys in its window of frames, rows and columns: softmax(q k^T) v.

    Windows are moved inward at the clip's and the frame's borders, so that all have the same number of keys.

    Args:
        q: [T, H, W, heads, D], scaled; frames from `window.first` on.
        k, v: [slots, H, W, heads, D], strided alike; the clip's frame f is in slot (f + ring) % slots, and every frame
            of the queries' windows is there.
        window: its size and place.
        bound: a number that no q . k exceeds; infinite where none is known.
        out: memory for the result, contiguous; may be q's where q is contiguous.
        schedule: overrides the table (checks and tuning only).

    Returns:
        [T, H, W, heads, D].

    Raises:
        ValueError: shapes or types differ.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    frames, height, width, heads, head = q.shape
    kernel = window.within(height, width)
    peak = bound * LOG2E
    # fp16 weights would lose their small values below 2^-14.
    bounded = peak <= LARGEST_PEAK and q.dtype != torch.float16
    if here.wgmma and schedule is None and (bounded or q.is_meta) and head == WIDE_HEAD:
        size = tuple(n + k - 1 for n, k in zip(WIDE_TILE, kernel[1:], strict=True))
        if height >= size[0] and width >= size[1] and wide_fits(kernel, size):
            table, kinds, grid = hidden(
                height, width, kernel[1:], WIDE_TILE, size, WIDE.keys, q.dtype, q.device, wide=True
            )
            launcher("neighbourhood.wide_neighbourhood_kernel", here)[
                (heads * math.prod(grid) * -(-frames // WIDE.frames),)
            ](
                q, k, v, table, kinds, out, frames, height, width, window.first, window.clip, ring, k.shape[0],
                window.origin, *grid, *kernel, LOG2E, peak, HEADS=heads, D=head, TOKEN_Q=q.stride(2),
                TOKEN_K=k.stride(2), RH=size[0], RW=size[1], BT=WIDE.frames, BH=WIDE_TILE[0], BW=WIDE_TILE[1],
                BM=WIDE.queries, BN=WIDE.keys, TERMS=TERMS, num_warps=WIDE.warps, maxnreg=REGISTERS,
            )  # fmt: skip
            if not q.is_meta:
                return out
    s = schedule or pick(here.sm)
    tile, size = s.tile(window.kernel)
    table, kinds, grid = hidden(height, width, kernel[1:], tile, size, s.keys, q.dtype, q.device)
    programs = heads * math.prod(grid) * -(-frames // s.frames)
    fits = height >= size[0] and width >= size[1]
    # Weights on the meta device have no bound, and frames there stand for all sizes: all forms are recorded.
    forms = itertools.product((False, True), repeat=2) if q.is_meta else ((fits, not bounded),)
    for inside, running in forms:
        launcher("neighbourhood.neighbourhood_kernel", here)[(programs,)](
            q, k, v, table, kinds, out, frames, height, width, window.first, window.clip, ring, k.shape[0], *grid,
            *kernel, LOG2E, 0.0 if running else peak, HEADS=heads, D=head, TOKEN_Q=q.stride(2), TOKEN_K=k.stride(2),
            RH=size[0], RW=size[1], WHOLE=whole(size[1]), BT=s.frames, BH=tile[0], BW=tile[1], BM=s.queries, BN=s.keys,
            TERMS=TERMS, num_warps=s.warps, INSIDE=inside, RUNNING=running, num_stages=s.stages,
            UPCAST=widened(q),
        )  # fmt: skip
    return out
