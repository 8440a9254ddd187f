"""Clips through a component that tiles itself: section by section, tile by tile, blended as the model defines it.

It is a loop of its own beside clip.py's, for equal bits and for speed: batches of tiles cross sections and clips, and
each tile is mixed on the device with its finished neighbours. There, one tile passes all its chunks before the next,
and weighted pixels are summed in host memory, in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.observe import observed
from ..network.native_tiles import NativeTiles, Section, Span
from ..network.steps import UNKNOWN, Latents
from ..planning.plan import Plan
from .guard import Guard, scoped
from .native_components import NativeComponent
from .regions import RegionWriter
from .results import Results
from .staging import StagedReader, StagedWriter
from .video import Video

#: Layout by which finished results are counted: there is no other way of tiling.
LAYOUT = "its own tiles"


class _Tile(NamedTuple):
    """Place of a tile: clip, section, row and column."""

    clip: int
    section: Section
    row: int
    column: int


def decode(
    half: NativeComponent, z: Latents, plan: Plan, results: Results, guard: Guard, wanted: range
) -> Iterator[int]:
    """Decode latents [B, C, T, h, w] into the wanted frames of every clip. Args: those of `clip.decode`.

    Yields: the number of latents, before each batch of tiles.
    """
    yield from scoped(half.aside, _decode(half, z, plan, results, guard, wanted))


def _decode(
    half: NativeComponent, z: Latents, plan: Plan, results: Results, guard: Guard, wanted: range
) -> Iterator[int]:
    own, (batch, _, latents, height, width) = half.program.own, z.shape
    rows, columns = own.spans(own.unit * height), own.spans(own.unit * width)
    if guard.begin(LAYOUT, results.given):
        results.begin()
    needed = own.needed(wanted.start, wanted.stop, latents)
    guard.count(own.latents * len(needed), own.latents, batch)
    # Frames that an earlier attempt has finished stay: the section before the rest is made again for its last frames.
    left = [range(max(wanted.start, guard.finished[clip]), wanted.stop) for clip in range(batch)]
    sections = [(clip, s) for clip, r in enumerate(left) if r for s in own.needed(r.start, wanted.stop, latents)]
    coming = len(rows) * len(columns) * len(sections)
    places = (
        _Tile(clip, section, i, j) for clip, section in sections for i in range(len(rows)) for j in range(len(columns))
    )
    cut = _Cuts(z, own, guard.device)
    with (
        half.memory(guard),
        RegionWriter(results, guard.device, guard.finish, half.ahead) as writer,
    ):
        canvas: _Canvas | None = None
        while some := [place for _, place in zip(range(plan.own.tiles), places, strict=False)]:
            yield latents
            guard.tick.check()
            tiles = [cut(place, rows[place.row], columns[place.column]) for place in some]
            made = half.decode(tiles, guard.tick.check, max(1, coming // plan.own.tiles))
            coming -= len(some)
            for place in some:
                if canvas is None or canvas.clip != place.clip:
                    canvas = _Canvas(own, rows, columns, place.clip, half.dtype, guard.device, plan.own.blend)
                pixels, health = canvas.add(place, next(made))
                _write(writer, canvas, place, pixels, health, left[place.clip])
                if (place.row, place.column) == (len(rows) - 1, len(columns) - 1):
                    done = place.section.index + 1 - needed[0].index
                    guard.reach(place.clip, own.latents * done, own.latents * (len(needed) - done))


def _write(
    writer: RegionWriter, canvas: _Canvas, place: _Tile, pixels: Tensor, health: Tensor, wanted: range
) -> None:
    """Write the wanted frames of a section's tile; pixels: [F, h, w, 3] in 0..1."""
    begin = place.section.begin
    first, end = max(begin, wanted.start), min(begin + len(pixels), wanted.stop)
    if first >= end:  # only the next section's first frames need them
        return
    region = canvas.region(place)
    last = (place.row, place.column) == (len(canvas.rows) - 1, len(canvas.columns) - 1)
    writer.write(place.clip, first, pixels[first - begin : end - begin], region, health, last)


class _Cuts:
    """Tiles of latents on the device; each section is read once."""

    def __init__(self, z: Latents, own: NativeTiles, device: torch.device) -> None:
        self._z, self._own, self._device = z, own, device
        self._at: tuple[int, int] | None = None
        self._latents = torch.empty(0)

    def __call__(self, place: _Tile, rows: Span, columns: Span) -> Tensor:
        section, unit = place.section, self._own.unit
        if self._at != (place.clip, section.index):
            there = self._z[place.clip, :, section.first : min(section.last, self._z.shape[2])].to(self._device)
            behind = section.last - section.first - there.shape[1]
            if behind:  # after the clip's end its last latent is repeated
                there = torch.cat((there, there[:, -1:].expand(-1, behind, -1, -1)), 1)
            self._at, self._latents = (place.clip, section.index), there.float()
        y, x = (slice(s.start // unit, s.end // unit) for s in (rows, columns))
        return self._latents[:, :, y, x]


class _Blend:
    """Tiles of a frame, row by row: each is blended with the one above, then with the one to its left.

    The parts of them that the next tiles need are kept, in the tiles' type; the arithmetic is in fp32."""

    def __init__(
        self, rows: Sequence[Span], columns: Sequence[Span], unit: int = 1, assembled: bool = False
    ) -> None:  # fmt: skip
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
            _mix(self._above[j], whole[..., : row.shared, :], -2)
        if column.shared:
            _mix(self._left, whole[..., : column.shared], -1)
        kept = whole if self._assembled else tile
        if below is not None:
            strip = kept[..., -below.shared :, :]
            if self._assembled and column.shared:  # there the picture has this tile, no longer the one before
                self._above[j - 1][..., -column.shared :] = strip[..., : column.shared]
            self._above[j] = strip.to(tile.dtype, copy=True)
        if right is not None:
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


def _mix(before: Tensor, here: Tensor, axis: int, shared: int = 0) -> None:
    """Set here = before * (1 - n / shared) + here * n / shared in place, for its n-th place on the axis.

    shared: number of all shared places, if `here` has only the first ones."""
    count = here.shape[axis]
    weight = torch.arange(count, device=here.device, dtype=torch.float32) / (shared or count)
    shape = [1] * here.ndim
    shape[axis] = count
    here.lerp_(before.float(), 1.0 - weight.view(shape))


class _Canvas:
    """Blends the tiles of one clip into finished pixels, without a whole frame ever being in memory.

    Only the frames that the next section is blended with are kept whole."""

    def __init__(
        self, own: NativeTiles, rows: Sequence[Span], columns: Sequence[Span], clip: int, dtype: torch.dtype,
        device: torch.device, blend: str = "separate",
    ) -> None:  # fmt: skip
        self.own, self.rows, self.columns, self.clip = own, rows, columns, clip
        self._blend = _Blend(rows, columns, assembled=blend == "assembled")
        self._kept = torch.empty(3, own.blended, rows[-1].end, columns[-1].end, dtype=dtype, device=device)
        self._section, self._mixes = -1, False
        self._units = [torch.tensor(v, device=device).view(3, 1, 1, 1) for v in (own.deviation, own.mean)]

    def region(self, place: _Tile) -> tuple[slice, slice]:
        (y, x), (height, width) = self._at(place), self._blend.size(place.row, place.column)
        return slice(y, y + height), slice(x, x + width)

    def _at(self, place: _Tile) -> tuple[int, int]:
        return self.rows[place.row].start, self.columns[place.column].start

    @observed
    def add(self, place: _Tile, made: Tensor) -> tuple[Tensor, Tensor]:
        """Blend a tile; `made` is [3, F, H, W], and tiles come in order.

        Returns: its part of the section's frames, with the frames after them at the clip's end, [f, h, w, 3] in 0..1,
        and their health.
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
            _mix(kept[:, :shared], x[:, :shared], 1, own.blended)
        health = x.sum()
        if not section.ends:
            kept.copy_(x[:, count:])
            x = x[:, :count]
        x = torch.addcmul(self._units[1], x, self._units[0]).clamp_(0.0, 1.0)
        return x.permute(1, 2, 3, 0), health


# -- encode -----------------------------------------------------------------------------------------------------------


def encode(
    half: NativeComponent, video: Video, plan: Plan, results: Results, guard: Guard, wanted: range
) -> Iterator[int]:
    """Encode frames into the wanted moments [n, h, w, 2C] of every clip. Args: those of `clip.encode`.

    Yields: before each section, the number of frames that must have arrived, unless the stream ends earlier.
    """
    own = half.program.own
    if guard.begin(LAYOUT, results.given):
        results.begin()

    def length() -> int:
        return UNKNOWN if video.count is None else own.encoded(video.count)

    known = length()
    guard.count(None if known == UNKNOWN else min(wanted.stop, known) - wanted.start, own.latents, video.batch)
    rows, columns = own.spans(video.height), own.spans(video.width)
    reader = StagedReader(guard.device, half.ahead)
    with half.memory(guard), StagedWriter(results, own.latents, guard.device, guard.finish, half.ahead) as writer:
        for clip in range(video.batch):
            first = max(wanted.start, guard.finished[clip]) // own.latents
            section = Section(first, 0, 0, own.frames * first, own.frames * (first + 1), 0)
            while own.latents * section.index < min(wanted.stop, length()):
                yield section.end + 1  # its last latents depend on whether more frames follow
                if own.latents * section.index >= length():
                    break
                _encode_section(half, video, clip, section, (rows, columns), reader, writer, guard, wanted)
                done = own.latents * (section.index - first + 1)
                left = 0 if length() == UNKNOWN else max(0, min(wanted.stop, length()) - wanted.start - done)
                guard.reach(clip, done, left)
                section = Section(section.index + 1, 0, 0, section.end, section.end + own.frames, 0)


def _encode_section(
    half: NativeComponent, video: Video, clip: int, section: Section, spans: tuple[Sequence[Span], Sequence[Span]],
    reader: StagedReader, writer: StagedWriter, guard: Guard, wanted: range,
) -> None:  # fmt: skip
    own, (rows, columns) = half.program.own, spans
    frames = video.frames(clip, section.begin, section.end)
    blend, moments, health = _Blend(rows, columns, own.unit), None, torch.zeros((), device=guard.device)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            guard.tick.check()
            cut = frames[:, row.start : row.end, column.start : column.end].contiguous()
            tile, health_of = half.encode(filled(own, reader.read(cut), video.count))
            part = blend.add(i, j, tile.permute(3, 0, 1, 2))
            if moments is None:
                size = blend.rows[-1].end, blend.columns[-1].end
                moments = torch.empty(*part.shape[:2], *size, device=guard.device)
            y, x = blend.rows[i].start, blend.columns[j].start
            moments[:, :, y : y + part.shape[2], x : x + part.shape[3]] = part
            health += health_of
    first = own.latents * section.index
    end = min(first + moments.shape[1], wanted.stop, own.encoded(video.count) if video.count else UNKNOWN)
    at = max(first, wanted.start, guard.finished[clip])
    if at < end:
        writer.write(clip, at, moments[:, at - first : end - first].permute(1, 2, 3, 0), health)


def filled(own: NativeTiles, frames: Tensor, count: int | None) -> Tensor:
    """Return frames as float32 in the network's units, with the last one repeated to a whole section.

    A clip of one frame stays one.

    Args:
        own: sizes of the network's tiles.
        frames: [f, H, W, 3] in 0..1, or bytes.
        count: frames of the clip; None while unknown.
    """
    x = own.in_units(frames)
    missing = 0 if count == 1 else own.frames - len(x)
    return torch.cat((x, x[-1:].expand(missing, -1, -1, -1))) if missing else x
