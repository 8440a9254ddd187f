"""Inputs of the parts of a call: either complete from the start, or frames that an iterator delivers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..execution.core import Core
from ..execution.video import StreamVideo
from ..network.steps import UNKNOWN


class Feed(Protocol):
    """Input of one clip, addressed by the results that are made of it."""

    def has(self, first: int, end: int) -> bool:
        """Check whether the input of results [first, end) has been read."""

    def fill(self, first: int, end: int) -> None:
        """Read the input of results [first, end). Called by the caller's thread."""

    def drop(self, first: int) -> None:
        """Free input that results from `first` on do not need."""


class Given:
    """Input that is complete from the start."""

    def has(self, first: int, end: int) -> bool:
        return True

    def fill(self, first: int, end: int) -> None:
        pass

    def drop(self, first: int) -> None:
        pass


GIVEN = Given()


@dataclass(frozen=True)
class Streamed:
    """Frames of a stream of known length, for an encoder."""

    core: Core
    video: StreamVideo

    def has(self, first: int, end: int) -> bool:
        return self.video.has(self._frames(first, end)[1])

    def fill(self, first: int, end: int) -> None:
        self.video.fill(self._frames(first, end)[1])

    def drop(self, first: int) -> None:
        self.video.drop(self._frames(first, first + 1)[0])

    def _frames(self, first: int, end: int) -> tuple[int, int]:
        """Return the frames [first, end) that results [first, end) are made of."""
        program, own, t = self.core.model.encoder.program, self.core.architecture.own, self.core.temporal
        if program.unstreamed:
            return 0, UNKNOWN
        if own is not None:
            return own.frames * (first // own.latents), own.frames * -(-end // own.latents) + 1
        a, b = program.window(first, end, self.core.architecture.latents(self.video.count))
        return t * a, t * (b - 1) + 1
