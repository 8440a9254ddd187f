"""How networks that tile themselves cut a clip into sections of frames, and those into tiles. Both are part of the
model: nobody else may tile it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Red, green and blue.
Colour = tuple[float, float, float]


class Span(NamedTuple):
    """A tile on one axis: pixels [start, end), of which the first `shared` are in the tile before, too."""

    start: int
    end: int
    shared: int


class Section(NamedTuple):
    """What a decoder makes at once in time: of latents [first, last), counted with the copies of the last one that
    stand behind the clip's end, frames [begin, end) of the clip, and `kept` frames behind those: the next section's
    first ones are blended with them, or, behind the last one, the clip ends with them."""

    index: int
    first: int
    last: int
    begin: int
    end: int
    kept: int
    ends: bool = True


@dataclass(frozen=True)
class OwnTiles:
    """In space: tiles of `size` pixels that share at least `least`; a latent pixel is `unit` of them. In time: sections
    of `frames` become `latents`, which a decoder takes with the next `more`; it makes `rate` frames of each, and leaves
    out the first `lead` of those of every `latents`. An encode leaves out the last `drop` latents.

    mean, deviation: of the network's pixels, whose units those of 0..1 are brought to."""

    size: int = 256
    least: int = 64
    unit: int = 16
    frames: int = 17
    latents: int = 5
    more: int = 2
    rate: int = 4
    lead: int = 3
    drop: int = 3
    mean: Colour = (0.0, 0.0, 0.0)
    deviation: Colour = (1.0, 1.0, 1.0)

    def in_units(self, frames: Tensor) -> Tensor:
        """[..., 3] in 0..1, or bytes -> float32 in the network's units."""
        x = frames.float()
        if frames.dtype == torch.uint8:
            x = x / 255.0
        return (x - x.new_tensor(self.mean)) / x.new_tensor(self.deviation)

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def blended(self) -> int:
        """Frames that two sections of a decode share."""
        return self.rate * self.more - self.lead

    def decoded(self, latents: int) -> int:
        """Frames that `latents` become."""
        return self.rate * latents - self.lead * -(-latents // self.latents)

    def encoded(self, frames: int) -> int:
        """Latents that `frames` become."""
        return 1 if frames == 1 else self.latents * -(-frames // self.frames) - self.drop

    def filled(self, frames: int) -> int:
        """The least count of frames, from this one on, whose latents become as many again."""
        if frames <= 1:
            return frames
        return self.frames * max(0, -(-(frames - self.blended) // self.frames)) + self.blended

    def sections(self, latents: int) -> list[Section]:
        """Of a clip's decode, in order."""
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
        """Sections that frames [first, end) are made of: also the one in front of the first, where that is blended with
        it."""
        sections = self.sections(latents)
        at = next((s.index for s in sections if first < s.end), len(sections) - 1)
        lead = at > 0 and first < min(sections[at].begin + self.blended, sections[at].end)
        return [s for s in sections[at - lead :] if s.begin < end]

    # -- space -----------------------------------------------------------------------------------------------------

    def spans(self, length: int) -> list[Span]:
        """Tiles on an axis of so many pixels. What they share beyond the least is spread over the first ones, a latent
        pixel at a time; where the axis is no whole latent pixels, the last tile is smaller."""
        if self.size >= length:
            return [Span(0, length, 0)]
        count = -(-length // self.size)
        while self.size * count - self.least * (count - 1) < length:
            count += 1
        spare = (self.size * count - self.least * (count - 1) - length) // self.unit
        more, extra = divmod(spare, count - 1)
        out, start = [Span(0, self.size, 0)], 0
        for i in range(count - 1):
            shared = self.least + self.unit * (more + (i < extra))
            start += self.size - shared
            out.append(Span(start, min(start + self.size, length), shared))
        return out
