"""The line that the host shows on a running node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.run.plan import Plan

#: Seconds between two lines; each is a message to the browser.
INTERVAL = 0.25


class Stages:
    """Progress of one decode or encode in words: stages(done, total) -> a line, or "" if one came just before."""

    def __init__(self, operation: str, plan: Plan, latents: int) -> None:
        """operation: "decode" or "encode"; latents: of the clip."""
        self._operation = operation
        self._chunks = -(-latents // plan.steps.latents)
        self._tiles = len(plan.grid) if plan.tiled else 0
        self._started = time.perf_counter()
        self._said = -INTERVAL

    @property
    def ticks(self) -> int:
        """Return the number of calls for one clip: one for each chunk of each part."""
        return self._chunks * (self._tiles + 1)

    def __call__(self, done: int, total: int) -> str:
        spent = time.perf_counter() - self._started
        if done < total and spent - self._said < INTERVAL:
            return ""
        self._said = spent
        if done == total:
            return f"{self._operation}: done in {spent:.1f} s"
        part, chunk = divmod((done - 1) % self.ticks, self._chunks)
        left = f"about {spent / done * (total - done):.0f} s left"
        return f"{self._operation}{self._part(part)}: chunk {chunk + 1} of {self._chunks}, {left}"

    def _part(self, index: int) -> str:
        """Name the part: decoding starts with the layers that see the whole frame, encoding ends with them."""
        if not self._tiles:
            return ""
        whole = 0 if self._operation == "decode" else self._tiles
        if index == whole:
            return ", whole frames"
        return f", tile {index + (self._operation == 'encode')} of {self._tiles}"
