"""A Run of which each of several ranks makes rows of the frames: what they tell each other, with the bits of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.conv3d import Geometry, Partials
from ..kernels.norm_act import Norm, coefficients, statistics
from .parking import BAND_ROWS
from .run import Run
from .weights import Conv


class Peers(Protocol):
    """The ranks that share frames, from top to bottom."""

    rank: int
    count: int

    def exchange(self, given: Mapping[int, Tensor], wanted: Mapping[int, Tensor]) -> None:
        """Contiguous tensors to other ranks, and into `wanted` what those give, as large and of that type."""

    def agreed(self, limits: Any, plan: Callable[[Any], Any]) -> Any:
        """The plan of all, for the least of their limits. Raises PlanError on all of them."""


@dataclass(frozen=True)
class Planned:
    """A rank that nothing is computed on."""

    rank: int
    count: int


@dataclass(frozen=True)
class Split:
    """Rows [edges[i], edges[i + 1]) of a frame are those of rank i. Whole: every rank has all."""

    edges: tuple[int, ...]
    whole: bool

    @classmethod
    def of(cls, rows: int, ranks: int) -> Split:
        """Parts begin where sums for norms do, as equal as that allows; whole where one would get nothing."""
        cuts = [round(rows * i / ranks / BAND_ROWS) * BAND_ROWS for i in range(ranks)]
        edges = (*cuts, rows)
        if all(a < b for a, b in pairwise(edges)):
            return cls(edges, False)
        return cls((0, rows), True)

    @property
    def rows(self) -> int:
        """Of the whole frame."""
        return self.edges[-1]

    def of_rank(self, rank: int, scale: int = 1) -> tuple[int, int]:
        """scale: of a frame that has so many rows for each of this."""
        if self.whole:
            return 0, scale * self.rows
        return scale * self.edges[rank], scale * self.edges[rank + 1]


@dataclass(frozen=True)
class Rows:
    """splits: of what goes into each stage of a network, of which the first sees whole frames."""

    peers: Peers
    splits: tuple[Split, ...]

    def of(self, rank: int) -> Rows:
        """Another rank's, for a plan."""
        return Rows(Planned(rank, self.peers.count), self.splits)

    def made(self, rows: int) -> tuple[int, int]:
        """Of results of so many rows those that are made here."""
        return self.splits[-1].of_rank(self.peers.rank, rows // self.splits[-1].rows)


class RowRun(Run):
    """Its rank's rows. Streams of a stage that is split hold those only; what convolutions read has one more on each
    side, which neighbours make."""

    def __init__(self, rows: Rows, *run: Any) -> None:
        """run: as for Run, whose histories are not parked."""
        super().__init__(*run)
        self._peers, self._splits, self._now = rows.peers, rows.splits, rows.splits[0]
        #: Blocks of sums that each rank has, by where they are of.
        self._blocks: dict[tuple[Any, ...], list[int]] = {}

    def agree(self) -> None:
        others = [r for r in range(self._peers.count) if r != self._peers.rank]
        told = {r: torch.empty_like(self.health) for r in others}
        self._peers.exchange(dict.fromkeys(others, self.health), told)
        for health in told.values():
            self.health.add_(health)

    @contextmanager
    def portion(self, x: Tensor, left: int) -> Iterator[Tensor]:
        before, self._now = self._now, self._splits[-left]
        try:
            with self.arena.scope():
                yield self._moved(x, before, self._now)
        finally:
            self._now = before

    def product(self, conv: Conv, data: Tensor, out: Tensor, *, geometry: Geometry, **options: Any) -> Partials | None:
        if not self._now.whole:
            rows = out.shape[1] // (options.get("weight") or conv.weight).phases[1]
            first, frame = self._here(rows)
            geometry = replace(geometry, first_row=first + geometry.first_row, frame_rows=frame)
        return super().product(conv, data, out, geometry=geometry, **options)

    def _coefficients(self, x: Tensor, norm: Norm, sums: Partials | None) -> Tensor | None:
        if self._now.whole or norm.kind != "group" or self.dry or not x.shape[0]:
            return super()._coefficients(x, norm, sums)
        sums = self.attempt(statistics, x, norm.groups) if sums is None else sums
        positions = self._here(x.shape[1])[1] * x.shape[2]
        return self.attempt(coefficients, self._all(sums), norm, positions, health=self.health)

    def edges(self, data: Tensor, slot: int, count: int) -> None:
        if self._now.whole or self.dry or not count:
            return
        slots, axis, rank = data.shape[0], data.dim() - 3, self._peers.rank
        beside = [(rank - 1, 1, 0), (rank + 1, -2, -1)]
        beside = [b for b in beside if 0 <= b[0] < self._peers.count]
        # 8-bit floats as bytes, which everything can copy.
        lines = (data.view(torch.uint8) if data.dtype.itemsize == 1 else data).movedim(axis, 0)
        wraps = max(slot + count - slots, 0)
        given = {peer: torch.cat((lines[own][slot : slot + count], lines[own][:wraps])) for peer, own, _ in beside}
        wanted = {peer: torch.empty_like(line) for peer, line in given.items()}
        self._peers.exchange(given, wanted)
        for peer, _, edge in beside:
            lines[edge][slot : slot + count] = wanted[peer][: count - wraps]
            lines[edge][:wraps] = wanted[peer][count - wraps :]

    # -- what ranks tell each other ------------------------------------------------------------------------------------

    def _here(self, rows: int) -> tuple[int, int]:
        """(the first of this rank's rows, rows of the frame), where those are `rows`."""
        a, b = self._now.of_rank(self._peers.rank)
        return a * rows // (b - a), self._now.rows * rows // (b - a)

    def _moved(self, x: Tensor, have: Split, want: Split) -> Tensor:
        """This rank's rows of a split, from those of another one."""
        rank, ranks = self._peers.rank, range(self._peers.count)
        scale = x.shape[1] // (have.of_rank(rank)[1] - have.of_rank(rank)[0])
        (a, b), (c, d) = have.of_rank(rank, scale), want.of_rank(rank)
        if a <= c and d <= b and have.whole:
            return x[:, c - a : d - a]
        if (a, b) == (c, d) and all(have.of_rank(r, scale) == want.of_rank(r) for r in ranks):
            return x
        out = self.take(x.shape[0], d - c, *x.shape[2:])
        if self.dry:
            return out
        given, wanted = {}, {}
        for peer in ranks:
            (e, f), (g, h) = have.of_rank(peer, scale), want.of_rank(peer)
            if peer == rank:
                first, last = max(a, c), min(b, d)
                if first < last:
                    out[:, first - c : last - c] = x[:, first - a : last - a]
                continue
            if max(a, g) < min(b, h):
                given[peer] = x[:, max(a, g) - a : min(b, h) - a].contiguous()
            if max(e, c) < min(f, d):
                wanted[peer] = x.new_empty(x.shape[0], min(f, d) - max(e, c), *x.shape[2:])
        self._peers.exchange(given, wanted)
        for peer, part in wanted.items():
            first = max(have.of_rank(peer, scale)[0], c) - c
            out[:, first : first + part.shape[1]] = part
        return out

    def _all(self, sums: Partials) -> Partials:
        """Of the whole frame, in its order."""
        own, rank = sums.data, self._peers.rank
        others = [r for r in range(self._peers.count) if r != rank]
        place = self._now, own.shape[1:]
        if place not in self._blocks:
            mine = torch.tensor([own.shape[1]], device=own.device)
            told = {r: torch.empty_like(mine) for r in others}
            self._peers.exchange(dict.fromkeys(others, mine), told)
            self._blocks[place] = [own.shape[1] if r == rank else int(told[r]) for r in range(self._peers.count)]
        blocks = self._blocks[place]
        parts = {r: own.new_empty(own.shape[0], blocks[r], *own.shape[2:]) for r in others}
        self._peers.exchange(dict.fromkeys(others, own.contiguous()), parts)
        ordered = [own if r == rank else parts[r] for r in range(self._peers.count)]
        return Partials(torch.cat(ordered, 1), sums.span)


def splits(rows: int, scales: Sequence[int], ranks: int) -> tuple[Split, ...]:
    """Of frames that have `rows` where stages have a scale of 1. The first stage sees whole frames."""
    return (Split((0, rows), True), *(Split.of(rows * scale, ranks) for scale in scales[1:]))
