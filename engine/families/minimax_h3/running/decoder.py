"""Decode clips section by section, tile by tile, blended as the model defines it.

It is a loop of its own beside that of execution/clip.py, for equal bits and for speed: batches of tiles cross sections
and clips, and each tile is mixed on the device with its finished neighbours. There, one tile passes all its chunks
before the next, and weighted pixels are summed in host memory, in any order. Encodes take that loop (components.py)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ....execution.guard import Guard, scoped
from ....execution.regions import RegionWriter
from ....execution.results import Results
from ....execution.reuse import Runs
from ....kernels.observe import observed
from ....network.steps import Latents
from ....options import Options
from ....planning.plan import Plan
from ..program import TiledProgram
from ..tiles import Blend, NativeTiles, Section, Span, mix
from .transformer import TokenNetwork


class _Tile(NamedTuple):
    """Place of a tile: clip, section, row and column."""

    clip: int
    section: Section
    row: int
    column: int


class TokenComponent:
    """A decoder made of a transformer.

    Attributes:
        program: the steps, with the sizes of the tiles.
        ahead: results may be copied to the host while the next ones are made.
        dtype: of pixels.
    """

    def __init__(self, network: TokenNetwork, program: TiledProgram, options: Options, plan: Plan, runs: Runs) -> None:
        self.program, self.ahead, self.dtype = program, options.overlap, network.dtype
        self._network, self._plan, self._runs = network, plan, runs
        self._frame = math.prod(plan.own.grid)

    def _aside(self) -> AbstractContextManager[None]:
        """Enter the stream of a decode's work; between two batches it may be left."""
        return self._runs.aside(self._plan, self._network.device)

    def through(self, data: Latents, plan: Plan, results: Results, guard: Guard, wanted: range) -> Iterator[int]:
        """Decode latents [B, C, T, h, w] into the wanted frames of every clip. Args: those of execution/clip.py.

        Yields: the number of latents, before each batch of tiles.
        """
        yield from scoped(self._aside, _decode(self, data, plan, results, guard, wanted))

    @contextmanager
    def memory(self, guard: Guard) -> Iterator[None]:
        """Scope the memory, which is taken when the first tile is there."""
        with ExitStack() as self._stack:
            self._guard, self._taken = guard, None
            yield

    def decode_tiles(self, tiles: Sequence[Tensor], check: Callable[[], None], left: int) -> Iterator[Tensor]:
        """Yield for each tile of latents [C, T, h, w] its pixels [3, F, H, W], in the network's units.

        left: least number of batches of so many tiles that come, this one included."""
        if self._taken is None:
            size = tuple(tiles[0].shape[1:])
            make = functools.partial(self._network.memory, size, self._frame)
            taken = self._runs.run(make, self._network, (size, self._frame), self._plan, self._guard)
            self._taken = self._stack.enter_context(taken)
        run, graphs = self._taken
        through = graphs and functools.partial(graphs.chunk, left=left)
        return self._network.decode(tiles, self._frame, check, run, through)


def _decode(
    half: TokenComponent, z: Latents, plan: Plan, results: Results, guard: Guard, wanted: range
) -> Iterator[int]:
    own, (batch, _, latents, height, width) = half.program.tiles(plan.own.trained), z.shape
    rows, columns = own.decoded_spans(own.unit * height, own.unit * width)
    if guard.begin(plan.grid, results.given):
        results.begin()
    needed = own.needed(wanted.start, wanted.stop, latents)
    guard.count(own.latents * len(needed), own.latents, batch)
    # Frames that an earlier attempt has finished stay: the section before the rest is made again for its last frames.
    left = [range(max(wanted.start, guard.finished[clip]), wanted.stop) for clip in range(batch)]
    sections = [(clip, s) for clip, r in enumerate(left) if r for s in own.needed(r.start, wanted.stop, latents)]
    coming, tiles = len(rows) * len(columns) * len(sections), _tiles(z, own, sections, rows, columns, guard.device)
    with half.memory(guard), RegionWriter(results, guard.device, guard.finish, half.ahead) as writer:
        canvas: _Canvas | None = None
        while some := list(itertools.islice(tiles, plan.own.tiles)):
            yield latents
            guard.tick.check()
            made = half.decode_tiles([cut for _, cut in some], guard.tick.check, max(1, coming // plan.own.tiles))
            coming -= len(some)
            for place, _ in some:
                if canvas is None or canvas.clip != place.clip:
                    canvas = _Canvas(
                        own, rows, columns, place.clip, half.dtype, guard.device, plan.own.blend, results.signed
                    )
                pixels, health = canvas.add(place, next(made))
                _write(writer, canvas, place, pixels, health, left[place.clip])
                if canvas.last(place):
                    done = place.section.index + 1 - needed[0].index
                    guard.reach(place.clip, own.latents * done, own.latents * (len(needed) - done))


def _tiles(
    z: Latents, own: NativeTiles, sections: Sequence[tuple[int, Section]], rows: Sequence[Span],
    columns: Sequence[Span], device: torch.device,
) -> Iterator[tuple[_Tile, Tensor]]:  # fmt: skip
    """Yield each tile with its latents [C, T, h, w] on the device, where each section is read once.

    sections: (clip, section), in order."""
    for clip, section in sections:
        there = z[clip, :, section.first : min(section.last, z.shape[2])].to(device)
        behind = section.last - section.first - there.shape[1]
        if behind:  # after the clip's end its last latent is repeated
            there = torch.cat((there, there[:, -1:].expand(-1, behind, -1, -1)), 1)
        there = there.float()
        for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
            y, x = (slice(s.start // own.unit, s.end // own.unit) for s in (row, column))
            yield _Tile(clip, section, i, j), there[:, :, y, x]


def _write(writer: RegionWriter, canvas: _Canvas, place: _Tile, pixels: Tensor, health: Tensor, wanted: range) -> None:
    """Write the wanted frames of a section's tile; pixels: [F, h, w, 3] in 0..1."""
    begin = place.section.begin
    first, end = max(begin, wanted.start), min(begin + len(pixels), wanted.stop)
    if first < end:  # otherwise only the next section's first frames need them
        part = pixels[first - begin : end - begin]
        writer.write(place.clip, first, part, canvas.region(place), health, canvas.last(place))


class _Canvas:
    """Blends the tiles of one clip into finished pixels, without a whole frame ever being in memory.

    Only the frames that the next section is blended with are kept whole."""

    def __init__(
        self, own: NativeTiles, rows: Sequence[Span], columns: Sequence[Span], clip: int, dtype: torch.dtype,
        device: torch.device, blend: str = "separate", signed: bool = False,
    ) -> None:  # fmt: skip
        self.own, self.rows, self.columns, self.clip = own, rows, columns, clip
        self._blend = Blend(rows, columns, assembled=blend == "assembled")
        self._kept = torch.empty(3, own.blended, rows[-1].end, columns[-1].end, dtype=dtype, device=device)
        self._section, self._mixes = -1, False
        units = (torch.tensor(v, device=device, dtype=torch.float32) for v in (own.deviation, own.mean))
        self._units, self._signed = [v.view(3, 1, 1, 1) for v in units], signed

    def last(self, place: _Tile) -> bool:
        """Check whether it is the last tile of its section."""
        return (place.row, place.column) == (len(self.rows) - 1, len(self.columns) - 1)

    def region(self, place: _Tile) -> tuple[slice, slice]:
        (y, x), (height, width) = self._at(place), self._blend.size(place.row, place.column)
        return slice(y, y + height), slice(x, x + width)

    def _at(self, place: _Tile) -> tuple[int, int]:
        return self.rows[place.row].start, self.columns[place.column].start

    @observed
    def add(self, place: _Tile, made: Tensor) -> tuple[Tensor, Tensor]:
        """Blend a tile; `made` is [3, F, H, W], and tiles come in order.

        Returns: its part of the section's frames, with the frames after them at the clip's end, [f, h, w, 3] in 0..1
        (signed: -1..1, not clamped), and their health.
        """
        own, section = self.own, place.section
        part, count = own.rate * own.latents, section.end - section.begin
        frames = made[:, own.lead : own.lead + count]
        if section.kept:
            frames = torch.cat((frames, made[:, part + own.lead : part + own.lead + section.kept]), 1)
        x = self._blend.add(place.row, place.column, frames)
        kept = self._kept[:, :, self.region(place)[0], self.region(place)[1]]
        shared = min(own.blended, count)
        if section.index != self._section:  # the section begins: it is mixed with the one before, if that was made
            self._section, self._mixes = section.index, section.index > 0 and section.index == self._section + 1
        if self._mixes:
            mix(kept[:, :shared], x[:, :shared], 1, own.blended)
        health = x.sum()
        if not section.ends:
            kept.copy_(x[:, count:])
            x = x[:, :count]
        x = torch.addcmul(self._units[1], x, self._units[0])
        x = x.mul_(2.0).sub_(1.0) if self._signed else x.clamp_(0.0, 1.0)
        return x.permute(1, 2, 3, 0), health
