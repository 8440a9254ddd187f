"""Convolutions of three frames in time alone, over a whole clip at once, with zeros before and after it."""

from __future__ import annotations

import math

from torch import Tensor

from ...kernels.conv3d import Geometry, Partials, padded_channels
from ...kernels.norm_act import Store, coefficients, norm_act
from ...runtime.context import BAND_BYTES, ExecutionContext
from ...runtime.history import Band, split_rows
from ...runtime.memory import Visit
from ...runtime.parking import BAND_ROWS
from ...runtime.rolling import Layer


def through_time(
    run: ExecutionContext, layers: tuple[Layer, Layer], x: Tensor, sums: Partials | None, inner: Tensor | None
) -> Partials | None:
    """Run x [T, H, W, C], all frames of a clip, through two convolutions, each after its norm, and add the result to x;
    return its sums.

    Normalised frames exist for a band of rows at a time: no position reads another one of its frame.

    Args:
        layers: the convolutions, C to C channels.
        sums: sums of x that the first norm needs; None to make them.
        inner: memory for the first one's results [T, H, W, C]; None to make them twice, band by band: the first time
            for their sums alone.
    """
    first, second = layers
    early, late, parts = run.coefficients_of(x, first.norm, sums), None, []
    with run.arena.scope():
        bands = _Bands(run, x, first, inner)
        for band in bands.all:
            parts.append(bands.convolve(first, x, early, band, bands.results(band)))
        bands.note(first, 1 if inner is not None else 2)
        if not run.dry:
            between = run.joined(parts)
            late = run.attempt(coefficients, between, second.norm, math.prod(x.shape[1:3]), health=run.health)
        parts = []
        for band in bands.all:
            if inner is None:
                bands.convolve(first, x, early, band, bands.results(band))
            rows = x[:, band.first : band.last]
            parts.append(bands.convolve(second, bands.results(band), late, band, rows, rows))
        bands.note(second, 1)
    return run.walk.sums(x, second.groups) if run.walk.open else run.joined(parts)


class _Bands:
    """A clip's frames in bands of rows, with memory for one band as the convolutions read it."""

    def __init__(self, run: ExecutionContext, x: Tensor, layer: Layer, inner: Tensor | None) -> None:
        self._run, self._x, self._inner, dtype = run, x, inner, layer.conv.dtype
        d, h, w, c = x.shape
        self._channels, asked = padded_channels(c, dtype), run.parked.parking
        self._line = (d + 2) * w * self._channels
        room = (asked.band_bytes if asked.keys is None else BAND_BYTES) // (self._line * dtype.itemsize)
        height = max((asked.rows or room) // BAND_ROWS, 1) * BAND_ROWS
        self._normed = run.arena.take((min(height, h) * self._line,), dtype)
        self._made = run.take(min(height, h) * d * w * c) if inner is None else None
        #: None of them in a dry run: all memory has been taken.
        self.all = () if run.dry else tuple(split_rows(h, 1, 1, height))

    def results(self, band: Band) -> Tensor:
        """Return the memory for the first convolution's results in a band, [T, rows, W, C]."""
        if self._inner is not None:
            return self._inner[:, band.first : band.last]
        d, _, w, c = self._x.shape
        rows = band.last - band.first
        return self._made[: d * rows * w * c].view(d, rows, w, c)

    def convolve(
        self, layer: Layer, x: Tensor, coefs: Tensor | None, band: Band, out: Tensor, residual: Tensor | None = None
    ) -> Partials | None:
        """Normalise a band of x (or x, if it is the band) and convolve it into `out`; return the sums of `out`."""
        run, conv, (d, h, w, _) = self._run, layer.conv, self._x.shape
        rows = band.last - band.first
        data = self._normed[: rows * self._line].view(d + 2, rows, w, self._channels)
        data[0].zero_()
        data[-1].zero_()
        given = x[:, band.first : band.last] if x.shape[1] == h else x
        store = Store(border=run.border, scale=conv.scale, gain=conv.gain)
        run.attempt(norm_act, given, layer.norm, data, slot=1, border=0, store=store, coefs=coefs, health=run.health)
        geometry = Geometry(first_row=band.first, frame_rows=h)
        return run.product(conv, data, out, geometry=geometry, groups=layer.groups, residual=residual)

    def note(self, layer: Layer, times: int) -> None:
        """Note the work of a convolution in a dry run."""
        if self._run.dry:
            work = times * self._run.walk.repeats * math.prod(self._x.shape[:3]) * layer.conv.weight.flops_per_position
            self._run.visits.setdefault(layer.conv.key, Visit(0)).work += work
