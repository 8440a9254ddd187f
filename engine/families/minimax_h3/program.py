"""Programs of a network that tiles itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor

from ...network.program import Program
from ...network.values import Work
from .tiles import NativeTiles


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

    def encoded(self, frames: int) -> int:
        return self.own.encoded(frames)

    def cut(self, read: Callable[[int, int], Tensor], first: int, end: int, origin: int, count: int | None) -> Tensor:
        start = self.own.frames * (first // self.own.latents)
        return read(start, start + self.own.frames)

    def warm_up(self, result: int, first: int) -> int:
        """Return 0: a section is made for its own frames, or for those that are blended with it."""
        return 0

    def in_units(self, frames: Tensor, signed: bool = False) -> Tensor:
        return self.own.in_units((frames + 1) / 2 if signed else frames)

    def alone(self, latents: int) -> tuple[int, int]:
        own, decodes = self.own, self.half == "decoder"
        count = len(own.sections(latents)) if decodes else -(-latents // own.latents)
        return own.frames if decodes else own.latents, count

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
