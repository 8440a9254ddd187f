"""A Run of which each of several ranks makes rows of the frames: what they tell each other, with the bits of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.conv3d import Geometry, Partials
from ..kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from .arena import ALIGN
from .parking import BAND_ROWS
from .run import Run
from .weights import Conv

WHOLE = Geometry()


class Peers(Protocol):
    """The ranks that share frames, from top to bottom."""

    rank: int
    count: int

    def exchange(self, given: Sequence[tuple[int, Tensor]], wanted: Sequence[tuple[int, Tensor]]) -> None:
        """Contiguous tensors to ranks, and into `wanted` what others give, in its order, as large and of that type."""

    def stacked(self, own: Tensor) -> Tensor:
        """[count, ...]: a tensor of every rank, contiguous and of one size and type on all of them."""

    def agreed(self, limits: Any, plan: Callable[[Any], Any]) -> Any:
        """The plan of all, for the least of their limits. Raises PlanError on all of them."""


@dataclass(frozen=True)
class Planned:
    """A rank that nothing is computed on."""

    rank: int
    count: int


@dataclass(frozen=True)
class Split:
    """Rows [edges[i], edges[i + 1]) of a frame are those of rank i. whole: every rank has all. wide: what reads them
    first doubles rows, in whole blocks, and needs others beside them."""

    edges: tuple[int, ...]
    whole: bool
    wide: bool = False

    @classmethod
    def of(cls, rows: int, ranks: int, step: int = BAND_ROWS, wide: bool = False) -> Split:
        """Parts begin with a multiple of `step`, as where sums for norms do, as equal as that allows; whole where one
        would get nothing."""
        cuts = [round(rows * i / ranks / step) * step for i in range(ranks)]
        edges = (*cuts, rows)
        if all(a < b for a, b in pairwise(edges)):
            return cls(edges, False, wide)
        return cls((0, rows), True, wide)

    @property
    def rows(self) -> int:
        """Of the whole frame."""
        return self.edges[-1]

    def of_rank(self, rank: int, scale: int = 1) -> tuple[int, int]:
        """scale: of a frame that has so many rows for each of this."""
        if self.whole:
            return 0, scale * self.rows
        return scale * self.edges[rank], scale * self.edges[rank + 1]

    def at(self, rank: int, rows: int) -> Split:
        """The same split of frames at the resolution at which this rank has so many rows."""
        first, last = self.of_rank(rank)
        if rows >= last - first:
            return replace(self, edges=tuple(rows // (last - first) * e for e in self.edges))
        # Resolutions are halves of each other, and the last row of an odd number is left out.
        shrinks = (last - first) // rows
        return replace(self, edges=tuple(e >> (shrinks.bit_length() - 1) for e in self.edges))

    def blocks(self, rank: int) -> tuple[int, int]:
        """As of_rank, from where the sums of the first row begin to where those of the last one end."""
        a, b = self.of_rank(rank)
        return a // BAND_ROWS * BAND_ROWS, min(-(-b // BAND_ROWS) * BAND_ROWS, self.rows)


@dataclass(frozen=True)
class Rows:
    """splits: of what goes into each stage of a network, as `network.rows.row_stages` has them."""

    peers: Peers
    splits: tuple[Split, ...]

    def of(self, rank: int) -> Rows:
        """Another rank's, for a plan."""
        return Rows(Planned(rank, self.peers.count), self.splits)

    def read(self) -> tuple[int, int]:
        """Of frames that go in those that are needed here."""
        return self.splits[0].of_rank(self.peers.rank)

    def made(self, rows: int) -> tuple[int, int]:
        """Of results of so many rows those that are made here."""
        return self.splits[-1].of_rank(self.peers.rank, rows // self.splits[-1].rows)


@dataclass(frozen=True)
class Overlapping(Partials):
    """Sums of a rank's blocks of rows, of which the first one may be another's too."""


class RowRun(Run):
    """Its rank's rows. Streams of a stage that is split hold those only; what convolutions read has one more on each
    side, which neighbours make. A convolution that doubles rows makes whole blocks of them, for the sums' sake, and its
    input comes with the rows that takes."""

    def __init__(self, rows: Rows, *run: Any) -> None:
        """run: as for Run, whose histories are not parked."""
        super().__init__(*run)
        self._peers, self._splits, self._now = rows.peers, rows.splits, rows.splits[0]
        #: What goes into a stage, with all rows that its first convolution reads.
        self._wide: Tensor | None = None
        #: Whole blocks of rows that the convolution under way makes sums of; it stores this rank's.
        self._span: tuple[int, int] | None = None
        #: Blocks of sums that each rank has, by where they are of: known to all ranks, or to none.
        self._blocks: dict[tuple[Any, ...], list[int]] = {}
        #: What the next convolution gets, and the first and last row of it of every rank, [ranks, D, 2, W, C]: they
        #: came with its sums.
        self._lines: tuple[Tensor, Tensor] | None = None

    def agree(self) -> None:
        self.health.copy_(self._peers.stacked(self.health).sum())

    def handed(self, x: Tensor) -> Tensor:
        rank, frames = self._peers.rank, range(x.shape[0])
        if rank and not (self._now.whole or self.dry):
            self._peers.exchange([(0, x[i]) for i in frames], [])
        if self._now.whole or rank:
            return x[:, :0] if rank else x
        split = self._now.at(rank, x.shape[1])
        out = self.arena.take((x.shape[0], split.rows, *x.shape[2:]), x.dtype)
        if not self.dry:
            others = [(r, slice(*split.of_rank(r))) for r in range(1, self._peers.count)]
            out[:, : x.shape[1]] = x
            self._peers.exchange([], [(r, out[i, rows]) for r, rows in others for i in frames])
        return out

    @contextmanager
    def portion(self, x: Tensor, left: int) -> Iterator[Tensor]:
        before, self._now, outer = self._now, self._splits[-left], self._wide
        try:
            with self.arena.scope():
                self._wide = self._moved(x, before, self._now)
                (a, b), first = self._now.of_rank(self._peers.rank), self._read(self._now, self._peers.rank)[0]
                yield self._wide[:, a - first : b - first]
        finally:
            self._now, self._wide = before, outer

    @contextmanager
    def apart(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._now = self._splits[0]

    def rows_of(self, rows: int) -> int:
        return rows if self._now.whole else self._now.at(self._peers.rank, rows).rows

    def together(self, x: Tensor, sums: Partials | None) -> tuple[Tensor, Partials | None]:
        """From here on this run makes whole frames, as all others do."""
        if self._now.whole:
            return x, sums
        have = self._now.at(self._peers.rank, x.shape[1])
        if sums is not None and not self.dry and x.shape[0]:
            sums = self._all(sums, have, None)
        self._now = Split((0, have.rows), True)
        return self._moved(x, have, self._now), sums

    def conv(self, conv: Conv, x: Tensor, out: Tensor, *normed: Any, **options: Any) -> Partials | None:
        if self._now.whole or conv.weight.phases[1] == 1:
            return super().conv(conv, x, out, *normed, **options)
        self._span = self._now.blocks(self._peers.rank)
        try:
            sums = super().conv(conv, self._wide, out, *normed, **options)
        finally:
            self._span = None
        return sums if sums is None else Overlapping(sums.data, sums.span)

    def beside(self) -> tuple[int, int] | None:
        if self._span is None:
            return None
        (first, last), (top, bottom) = self._span, self._read(self._now, self._peers.rank)
        return first - top, bottom - last

    def product(
        self, conv: Conv, data: Tensor, out: Tensor, *, geometry: Geometry = WHOLE, **options: Any
    ) -> Partials | None:
        if not self._now.whole:
            rows = out.shape[1] // (options.get("weight") or conv.weight).phases[1]
            first, frame = self._here(rows)
            beside = (0, 0)
            if self._span is not None:
                (a, b), last = self._now.of_rank(self._peers.rank), self._span[1]
                beside = a - first, last - b
            geometry = replace(geometry, first_row=first + geometry.first_row, frame_rows=frame, beside=beside)
        return super().product(conv, data, out, geometry=geometry, **options)

    def coefficients_of(self, x: Tensor, norm: Norm, sums: Partials | None) -> Tensor | None:
        if self._now.whole or norm.kind != "group" or self.dry or not x.shape[0]:
            return super().coefficients_of(x, norm, sums)
        read_by = norm.weight, sums is None
        sums = self.attempt(statistics, x, norm.groups) if sums is None else sums
        split = self._now.at(self._peers.rank, x.shape[1])
        whole = self._all(sums, split, read_by, x)
        return self.attempt(coefficients, whole, norm, split.rows * x.shape[2], health=self.health)

    def edges(self, data: Tensor, slot: int, count: int, x: Tensor | None = None, *normed: Any) -> None:
        if self._now.whole or self.dry or not count:
            return
        slots, axis, rank = data.shape[0], data.dim() - 3, self._peers.rank
        above, below = rank > 0, rank + 1 < self._peers.count
        # 8-bit floats as bytes, which everything can copy.
        lines = bytewise(data).movedim(axis, 0)
        wraps = max(slot + count - slots, 0)
        pieces = [(slice(slot, slot + count - wraps), slice(count - wraps)), (slice(wraps), slice(count - wraps, None))]
        pieces = pieces[: 1 + (wraps > 0)]
        raw, self._lines = self._lines, None
        if raw is not None and raw[0] is x:
            top = self._normed(data, raw[1][rank - 1, :, 1], *normed) if above else None
            bottom = self._normed(data, raw[1][rank + 1, :, 0], *normed) if below else None
        else:
            own = lines.new_empty(2, count, *lines.shape[2:])
            for there, here in pieces:
                if above:
                    own[0, here] = lines[1, there]
                if below:
                    own[1, here] = lines[-2, there]
            told = self._peers.stacked(own)
            top, bottom = told[rank - 1, 1] if above else None, told[rank + 1, 0] if below else None
        for there, here in pieces:
            if top is not None:
                lines[0, there] = top[here]
            if bottom is not None:
                lines[-1, there] = bottom[here]

    def _normed(self, data: Tensor, row: Tensor, norm: Norm, store: Store, coefs: Tensor | None) -> Tensor:
        """A neighbour's row [D, W, C] as that would store it: of `data` a line for each frame."""
        axis = data.dim() - 3
        out = data.new_empty(row.shape[0], *data.shape[1:axis], 1, *data.shape[axis + 1 :])
        self.attempt(norm_act, row.unsqueeze(1), norm, out, store=store, coefs=coefs, first=1, health=self.health)
        return bytewise(out).squeeze(axis)

    # -- what ranks tell each other ------------------------------------------------------------------------------------

    def _here(self, rows: int) -> tuple[int, int]:
        """(the first of this rank's rows, rows of the frame), where those are `rows`."""
        if self._span is not None:
            return self._span[0], self._now.rows
        split = self._now.at(self._peers.rank, rows)
        return split.of_rank(self._peers.rank)[0], split.rows

    @staticmethod
    def _read(split: Split, rank: int) -> tuple[int, int]:
        """Rows that a stage reads."""
        if split.whole or not split.wide:
            return split.of_rank(rank)
        first, last = split.blocks(rank)
        return max(first - 1, 0), min(last + 1, split.rows)

    def _moved(self, x: Tensor, have: Split, want: Split) -> Tensor:
        """What this rank reads of one split, from its rows of another one."""
        rank, ranks = self._peers.rank, range(self._peers.count)
        scale = x.shape[1] // (have.of_rank(rank)[1] - have.of_rank(rank)[0])
        (a, b), (c, d) = have.of_rank(rank, scale), self._read(want, rank)
        if have.whole and (want.wide or want.whole):
            return x[:, c:d]
        out = self.take(x.shape[0], d - c, *x.shape[2:])
        if self.dry or not x.shape[0]:
            return out
        if have.whole:
            return out.copy_(x[:, c:d])
        given, wanted, frames = [], [], range(x.shape[0])
        for peer in ranks:
            (e, f), (g, h) = have.of_rank(peer, scale), self._read(want, peer)
            if peer == rank:
                first, last = max(a, c), min(b, d)
                if first < last:
                    out[:, first - c : last - c] = x[:, first - a : last - a]
                continue
            if max(a, g) < min(b, h):
                given += [(peer, x[i, max(a, g) - a : min(b, h) - a]) for i in frames]
            if max(e, c) < min(f, d):
                wanted += [(peer, out[i, max(e, c) - c : min(f, d) - c]) for i in frames]
        self._peers.exchange(given, wanted)
        return out

    def _all(self, sums: Partials, split: Split, read_by: Hashable, x: Tensor | None = None) -> Partials:
        """Of the whole frame, in its order. split: of the rows that they are sums of. read_by: tells what reads them
        from everything else, on all ranks alike. x: of which the first and the last row travel along."""
        own, whole = sums.data, range(self._peers.count)
        # Not by how many blocks there are here: those of two convolutions may be as many on one rank only.
        place = split, type(sums), read_by
        if place not in self._blocks:
            self._blocks[place] = self._peers.stacked(torch.tensor(own.shape[1], device=own.device)).tolist()
        blocks = self._blocks[place]
        if blocks[self._peers.rank] != own.shape[1]:
            raise ValueError(f"{own.shape[1]} blocks of sums where there were {blocks[self._peers.rank]}")
        told = self._told(own, max(blocks), x)
        ordered = [part[:, :n] for part, n in zip(told, blocks, strict=True)]
        if isinstance(sums, Overlapping):
            end = self._now.blocks(0)[1]
            if end == self._now.rows:  # of the whole frame
                return Partials(ordered[0], sums.span)
            each = blocks[0] // (end // BAND_ROWS)
            twice = [self._now.blocks(r)[0] < self._now.of_rank(r)[0] for r in whole]
            ordered = [p[:, each * again :] for p, again in zip(ordered, twice, strict=True)]
        return Partials(torch.cat(ordered, 1), sums.span)

    def _told(self, own: Tensor, most: int, x: Tensor | None) -> Tensor:
        """Every rank's sums, of `most` blocks, [ranks, D, most, ...]; with the first and last row of x, where it has
        some, in one message: an exchange takes longer than what it carries."""
        d, have, *rest = own.shape
        rows = () if x is None else (d, 2, *x.shape[2:])
        ahead = 0 if x is None else math.prod(rows) * x.dtype.itemsize
        size = d * most * math.prod(rest) * own.dtype.itemsize
        # Kernels read each rank's as they read a tensor of its own.
        begin, whole = -(-ahead // ALIGN) * ALIGN, -(-size // ALIGN) * ALIGN
        message = torch.empty(begin + whole, dtype=torch.uint8, device=own.device)
        sums = slice(begin, begin + size)
        message[sums].view(own.dtype).view(d, most, *rest)[:, :have] = own
        if x is not None:
            message[:ahead].view(x.dtype).view(rows).copy_(x[:, :: max(x.shape[1] - 1, 1)])  # a single row twice
        told = self._peers.stacked(message)
        if x is not None:
            self._lines = x, told[:, :ahead].view(x.dtype).view(-1, *rows)
        return told[:, sums].view(own.dtype).view(-1, d, most, *rest)


def bytewise(data: Tensor) -> Tensor:
    """The same memory, floats of 8 bit as bytes."""
    return data.view(torch.uint8) if data.dtype.itemsize == 1 else data
