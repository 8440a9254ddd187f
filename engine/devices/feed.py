"""What parts of a call are read from: all is there, or frames come as an iterator gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..core import Core
from ..run.passes import UNKNOWN
from ..video import StreamVideo


class Feed(Protocol):
    """Of one clip, told in results."""

    def has(self, first: int, end: int) -> bool:
        """Whether what results [first, end) are made of is there."""

    def fill(self, first: int, end: int) -> None:
        """Have it there. Called by the caller's thread."""

    def drop(self, first: int) -> None:
        """Let go of what results from `first` on need not."""


class Given:
    """All is there."""

    def has(self, first: int, end: int) -> bool:
        return True

    def fill(self, first: int, end: int) -> None:
        pass

    def drop(self, first: int) -> None:
        pass


GIVEN = Given()


@dataclass(frozen=True)
class Streamed:
    """Frames of a stream, whose number is known, for an encoder."""

    core: Core
    video: StreamVideo

    def has(self, first: int, end: int) -> bool:
        return self.video.has(self._frames(first, end)[1])

    def fill(self, first: int, end: int) -> None:
        self.video.fill(self._frames(first, end)[1])

    def drop(self, first: int) -> None:
        self.video.drop(self._frames(first, first + 1)[0])

    def _frames(self, first: int, end: int) -> tuple[int, int]:
        """Those that results [first, end) are made of."""
        program, own, t = self.core.model.encoder.program, self.core.architecture.own, self.core.temporal
        if program.unstreamed:
            return 0, UNKNOWN
        if own is not None:
            return own.frames * (first // own.latents), own.frames * -(-end // own.latents) + 1
        a, b = program.window(first, end, self.core.architecture.latents(self.video.count))
        return t * a, t * (b - 1) + 1
