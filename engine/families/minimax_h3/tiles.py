"""Tiles of pixels of a network that tiles itself, and how they are blended.

All of it is part of the model, so no other tiling may be used for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...network.sections import Sections

#: Values for red, green and blue.
Colour = tuple[float, float, float]


class Span(NamedTuple):
    """A tile on one axis: pixels [start, end), of which the first `shared` also belong to the tile before."""

    start: int
    end: int
    shared: int


class Section(NamedTuple):
    """Section in time that a decoder makes at once, of latents [first, last), into frames [begin, end) of the clip.

    Latents after the clip's end are copies of its last one. The section also makes `kept` frames after `end`: the next
    section's first frames are blended with them; after the last section the clip ends with them. ends: it is the last
    one."""

    index: int
    first: int
    last: int
    begin: int
    end: int
    kept: int
    ends: bool = True


@dataclass(frozen=True)
class NativeTiles(Sections):
    """Sizes of a network's own tiles and sections.

    Tiles of `size` pixels share at least `least`; a latent pixel is `unit` pixels. mean, deviation: of the network's
    pixels, to scale 0..1 to its units."""

    size: int = 256
    least: int = 64
    #: Other (size, least) for decodes: of a frame's shorter side, of its longer one, and of sides that are equal. One
    #: tile that is enough for its side may then be larger, by the least overlap.
    sides: tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None = None
    unit: int = 16
    mean: Colour = (0.0, 0.0, 0.0)
    deviation: Colour = (1.0, 1.0, 1.0)
    in_tiles: ClassVar[bool] = True

    def in_units(self, frames: Tensor) -> Tensor:
        """Return frames [..., 3] in 0..1, or bytes, as float32 in the network's units."""
        x = frames.float()
        if frames.dtype == torch.uint8:
            x = x / 255.0
        return (x - x.new_tensor(self.mean)) / x.new_tensor(self.deviation)

    def reads(self, first: int, end: int) -> tuple[int, int]:
        """Return the frames [a, b) that must be there before latents [first, end) of a clip can be encoded: a section's
        last latents depend on whether more frames follow."""
        return self.frames * (first // self.latents), self.frames * -(-end // self.latents) + 1

    def sections(self, latents: int) -> list[Section]:
        """Return the sections of a clip's decode, in order."""
        total = self.decoded(latents)
        if latents == 1:
            return [Section(0, 0, 1, 0, 1, 0)]
        count = max(1, -(-(latents + self.drop) // self.latents) - 1)
        out = []
        for i in range(count):
            begin, end = self.frames * i, min(self.frames * (i + 1), total)
            kept = min(self.blended, total - end)
            last = self.latents * (i + 1) + self.more
            out.append(Section(i, self.latents * i, last, begin, end, kept, i == count - 1))
        return out

    def needed(self, first: int, end: int, latents: int) -> list[Section]:
        """Return the sections that make frames [first, end), with the one before if the first is blended with it.

        latents: of the clip."""
        sections = self.sections(latents)
        at = next((s.index for s in sections if first < s.end), len(sections) - 1)
        lead = at > 0 and first < min(sections[at].begin + self.blended, sections[at].end)
        return [s for s in sections[at - lead :] if s.begin < end]

    def spans(self, length: int) -> list[Span]:
        """Return the tiles on an axis of `length` pixels.

        Overlap beyond the least is spread over the first ones, a latent pixel at a time; if the axis is not a whole
        number of latent pixels, the last tile is smaller."""
        if self.size >= length:
            return [Span(0, length, 0)]
        count = -(-length // self.size)
        while self.size * count - self.least * (count - 1) < length:
            count += 1
        return self._spread(length, self.size, self.least, count)

    def decoded_spans(self, height: int, width: int) -> tuple[list[Span], list[Span]]:
        """Return the tiles on both axes of a frame of that many pixels that is decoded."""
        if self.sides is None:
            return self.spans(height), self.spans(width)
        short, long, even = self.sides
        rows, columns = (even, even) if height == width else (short, long) if height < width else (long, short)
        return self._stretched(height, *rows), self._stretched(width, *columns)

    def _stretched(self, length: int, size: int, least: int) -> list[Span]:
        """Return as few tiles of `size` as cover an axis side by side, larger where their overlaps need it."""
        if length <= size + least:
            return [Span(0, length, 0)]
        count = -(-length // size)
        needed = -(-(length + least * (count - 1)) // (count * self.unit)) * self.unit
        return self._spread(length, max(size, needed), least, count)

    def _spread(self, length: int, size: int, least: int, count: int) -> list[Span]:
        more, extra = divmod((size * count - least * (count - 1) - length) // self.unit, count - 1)
        out, start = [Span(0, size, 0)], 0
        for i in range(count - 1):
            shared = least + self.unit * (more + (i < extra))
            start += size - shared
            out.append(Span(start, min(start + size, length), shared))
        return out


class Blend:
    """Tiles of a frame, row by row: each is blended with the one above, then with the one to its left.

    The parts of them that the next tiles need are kept, in the tiles' type; the arithmetic is in fp32."""

    def __init__(self, rows: Sequence[Span], columns: Sequence[Span], unit: int = 1, assembled: bool = False) -> None:
        """Prepare for the given spans. unit: pixels of a span for each of a tile's pixels. assembled: neighbours are
        taken as they are in the picture, blended with theirs; else as they came."""
        self._assembled = assembled
        self.rows, self.columns = ([_in(s, unit) for s in spans] for spans in (rows, columns))
        self._above: dict[int, Tensor] = {}
        self._left: Tensor | None = None

    def add(self, i: int, j: int, tile: Tensor) -> Tensor:
        """Blend tile [..., h, w]; return float32 without the part that belongs to the tiles below and to the right."""
        row, column = self.rows[i], self.columns[j]
        below = self.rows[i + 1] if i + 1 < len(self.rows) else None
        right = self.columns[j + 1] if j + 1 < len(self.columns) else None
        whole = tile.float() if tile.dtype != torch.float32 else tile.clone()
        if row.shared:
            mix(self._above[j], whole[..., : row.shared, :], -2)
        if column.shared:
            mix(self._left, whole[..., : column.shared], -1)
        kept = whole if self._assembled else tile
        if below is not None and below.shared:
            strip = kept[..., -below.shared :, :]
            if self._assembled and column.shared:  # there the picture has this tile, no longer the one before
                self._above[j - 1][..., -column.shared :] = strip[..., : column.shared]
            self._above[j] = strip.to(tile.dtype, copy=True)
        if right is not None and right.shared:
            self._left = kept[..., -right.shared :].to(tile.dtype, copy=True)
        height, width = self.size(i, j)
        return whole[..., :height, :width]

    def size(self, i: int, j: int) -> tuple[int, int]:
        """Return the rows and columns of the result of `add`."""
        return _own_length(self.rows, i), _own_length(self.columns, j)


def _in(span: Span, unit: int) -> Span:
    start = span.start // unit
    return Span(start, start + (span.end - span.start) // unit, span.shared // unit)


def _own_length(spans: Sequence[Span], i: int) -> int:
    return (spans[i + 1].start if i + 1 < len(spans) else spans[i].end) - spans[i].start


def mix(before: Tensor, here: Tensor, axis: int, shared: int = 0) -> None:
    """Set here = before * (1 - n / shared) + here * n / shared in place, for its n-th place on the axis.

    shared: number of all shared places, if `here` has only the first ones."""
    count = here.shape[axis]
    weight = torch.arange(count, device=here.device, dtype=torch.float32) / (shared or count)
    shape = [1] * here.ndim
    shape[axis] = count
    here.lerp_(before.float(), 1.0 - weight.view(shape))
