"""Tiles as other programs lay and blend them: windows of one axis, ramps, weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """One tile on one axis: where its input begins and ends, where its output begins, and the weights of the output's
    samples as weights(count)."""

    start: int
    end: int
    at: int
    weights: Callable[[int], Tensor]


def blended(
    x: Tensor, rows: Sequence[Window], columns: Sequence[Window], size: tuple[int, int],
    run: Callable[[Tensor], Tensor], weight: Callable[[Tensor, Tensor], Tensor], least: float = 0.0,
) -> Tensor:  # fmt: skip
    """Run tiles and blend them.

    Args:
        x: [B, C, T, H, W].
        size: rows and columns of the result.
        run: makes [b, c, t, h, w] of a tile.
        weight: weight of a tile from weights of its rows [h, 1] and columns [1, w].
        least: the least weight that sums are divided by.

    Returns: [b, c, t, *size] float32 on the CPU. Samples that no tile covers are NaN, unless `least` is above 0.
    """
    total = weights = None
    for row in rows:
        for column in columns:
            y = run(x[..., row.start : row.end, column.start : column.end]).float().cpu()
            mask = weight(row.weights(y.shape[-2])[:, None], column.weights(y.shape[-1])[None])
            if total is None:
                total = torch.zeros(*y.shape[:3], *size, dtype=torch.float32, device="cpu")
                weights = torch.zeros(size, dtype=torch.float32, device="cpu")
            part = slice(row.at, row.at + y.shape[-2]), slice(column.at, column.at + y.shape[-1])
            total[..., part[0], part[1]] += y * mask
            weights[part] += mask
    return total / weights.clamp(min=least) if least else total / weights


def edges(count: int, before: Tensor | None, after: Tensor | None) -> Tensor:
    """Return weights of `count` samples: 1, rising as `before` at their beginning and falling as `after` at their
    end."""
    weights = torch.ones(count, dtype=torch.float32, device="cpu")
    if before is not None:
        weights[: len(before)] = before[:count]
    if after is not None and len(after):
        weights[-len(after) :] = after[-count:]
    return weights


def in_pieces(
    x: Tensor, run: Callable[[Tensor], Tensor], pieces: tuple[int, int] | None, made: tuple[int, int] | None
) -> Tensor:
    """Run a clip in pieces along time, and blend them as diffusers does.

    A piece has one sample more than its size. All but the first one's result lose their first sample, and begin with
    what the piece before made of the same time, faded out.

    Args:
        x: [B, C, T, H, W].
        run: makes [b, c, t, h, w] of a piece.
        pieces: samples of a piece and from one to the next; None, or as many as x has: all at once.
        made: the same of the result.
    """
    if pieces is None or x.shape[2] <= pieces[0]:
        return run(x)
    shared, parts, last = made[0] - made[1], [], None
    for start in range(0, x.shape[2], pieces[1]):
        y = run(x[:, :, start : start + pieces[0] + 1])
        if last is not None:
            y = y[:, :, 1:]
            n = min(last.shape[2], y.shape[2], shared)
            rise = (torch.arange(n, dtype=y.dtype, device=y.device) / max(n, 1)).view(-1, 1, 1)
            y[:, :, :n] = last[:, :, last.shape[2] - n :] * (1 - rise) + y[:, :, :n] * rise
        parts.append(y[:, :, : made[1] + (last is None)])
        last = y
    count = 1 + (x.shape[2] - 1) * made[0] // pieces[0]
    return torch.cat(parts, 2)[:, :, :count]
