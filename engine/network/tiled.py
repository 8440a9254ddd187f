"""Programs of networks that tile themselves."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction

from .native_tiles import NativeTiles
from .program import Program
from .values import Work


@dataclass(frozen=True)
class TiledProgram(Program):
    """A Program for one tile of one section of a clip, as `own` divides it; its methods count for whole clips."""

    own: NativeTiles = field(default_factory=NativeTiles)
    #: The tiles that these weights were trained with, where they differ; used where a request names them.
    trained: NativeTiles | None = None

    def tiles(self, trained: bool) -> NativeTiles:
        """Return the tiles of a decode: of its family, or those that its weights were trained with."""
        return self.trained if trained else self.own  # type: ignore[return-value]

    def frames(self, count: int) -> int:
        return self.own.decoded(count) if self.half == "decoder" else self.own.encoded(count)

    def work(self, frames: int, height: int, width: int) -> Work:
        """Return the work of a whole clip: of all tiles of all its sections."""
        own, decodes = self.own, self.half == "decoder"
        unit = own.unit if decodes else 1
        count = len(own.sections(frames)) if decodes else -(-frames // own.frames)
        first = own.sections(frames)[0]
        each = first.last - first.first if decodes else 1 if frames == 1 else own.frames
        total = Work()
        sides = unit * height, unit * width
        rows, columns = own.decoded_spans(*sides) if decodes else map(own.spans, sides)
        for row, column in itertools.product(rows, columns):
            size = (row.end - row.start) // unit, (column.end - column.start) // unit
            total += super().work(each, *size)
        return Work(*(count * value for value in total))

    @property
    def reach(self) -> tuple[Fraction | float, Fraction | float]:
        """Return infinity on both sides: a clip may be cut only between sections."""
        return math.inf, math.inf

    def window(self, first: int, end: int, latents: int) -> tuple[int, int]:
        """Return the latents [a, b) that results [first, end) need, or are made with."""
        if self.half == "decoder":
            needed = self.own.needed(first, end, latents)
            return needed[0].first, min(needed[-1].last, latents)
        size = self.own.latents
        return first // size * size, min(-(-end // size) * size, latents)
