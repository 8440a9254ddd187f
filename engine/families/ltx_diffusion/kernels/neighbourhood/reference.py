"""Neighbourhood attention in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import Window, regions

#: Rows and columns of queries that share a region of keys: keys are copied 5 times for a window of 11x11.
TILE = (8, 8)


def neighbourhood(q: Tensor, k: Tensor, v: Tensor, window: Window, ring: int, out: Tensor) -> None:
    """Compute dispatch.neighbourhood in the type of q, a row of tiles at a time; memory grows with a row's keys."""
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


def _places(length: int, tile: int, size: int, kernel: int, tiles: int, device: torch.device) -> Tensor:
    """Return the keys along one axis of every tile's region, [tiles, size]."""
    first = torch.arange(tiles, device=device)[:, None] * tile - kernel // 2
    return first.clamp(max=length - size).clamp_(min=0) + torch.arange(size, device=device)
