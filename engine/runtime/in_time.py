"""Convolutions of three frames in time alone, over a whole clip at once, with zeros before and after it."""

from __future__ import annotations

import math

from torch import Tensor

from ..kernels.conv3d import Geometry, Partials, padded_channels
from ..kernels.norm_act import Norm, Store, norm_act
from .context import BAND_BYTES, ExecutionContext
from .history import split_rows
from .memory import Visit
from .parking import BAND_ROWS
from .weights import Conv


def in_time(
    run: ExecutionContext, conv: Conv, x: Tensor, out: Tensor, norm: Norm, sums: Partials | None, groups: int,
    residual: Tensor | None = None,
) -> Partials | None:  # fmt: skip
    """Normalise x [T, H, W, C], all frames of a clip, and run it through `conv` into `out` [T, H, W, K].

    The normalised frames exist for a band of rows at a time: no position reads another one of its frame.

    Args:
        conv: packed weight of 3x1x1 taps.
        norm: norm of x.
        sums: sums of x that the norm needs; None to make them.
        groups: if not 0, the sums of `out` in so many groups are returned.
        residual: added to the results; may be `out`.
    """
    d, h, w, c = x.shape
    coefs, channels = run.coefficients_of(x, norm, sums), padded_channels(c, conv.dtype)
    asked, line = run.parked.parking, (d + 2) * w * channels
    room = (asked.band_bytes if asked.keys is None else BAND_BYTES) // (line * conv.dtype.itemsize)
    bands = list(split_rows(h, 1, 1, max((asked.rows or room) // BAND_ROWS, 1) * BAND_ROWS))
    store, parts = Store(border=run.border, scale=conv.scale, gain=conv.gain), []
    if run.dry:
        visit = run.visits.setdefault(conv.key, Visit(0))
        visit.work += run.walk.repeats * math.prod(x.shape[:3]) * conv.weight.flops_per_position
    with run.arena.scope():
        memory = run.arena.take((max(band.last - band.first for band in bands) * line,), conv.dtype)
        for band in bands if not run.dry else ():
            rows = slice(band.first, band.last)
            data = memory[: (band.last - band.first) * line].view(d + 2, -1, w, channels)
            data[0].zero_()
            data[-1].zero_()
            run.attempt(norm_act, x[:, rows], norm, data, slot=1, border=0, store=store, coefs=coefs, health=run.health)
            parts.append(run.product(
                conv, data, out[:, rows], geometry=Geometry(first_row=band.first, frame_rows=h), groups=groups,
                residual=None if residual is None else residual[:, rows],
            ))  # fmt: skip
    if run.walk.open:
        return run.walk.sums(out, groups)
    return run.joined(parts)
