"""Plans of plain torch: chunks and frames per step."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator

from ..network.program import Program
from ..network.steps import Steps
from ..network.tiles import Grid
from .ask import Ask
from .cost import plain_steps
from .plan import Plan
from .plans import Known, check


class PlainPlans:
    """Plans of one model in plain torch."""

    def __init__(self, known: Known) -> None:
        self._model, self._walk, self._besides = known.model, known.plain, known.besides
        #: Returns True for a component whose frames run one by one, whatever the frames per step.
        self._single = known.walk.single
        self._how, self.itemsize = known.how, known.walk.dtype.itemsize

    def check(self, ask: Ask) -> str:
        return check(self.program(ask), ask)

    def of(self, ask: Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        steps = list(self.steps(ask, tiles))

        def fits(some: Steps) -> bool:
            ask.check()
            fixed = self._besides(ask.half, False)
            return target is None or fixed + self.peak(ask, tiles, some, target) <= target

        launches = self.program(ask).launches
        for some in steps[bisect_left(steps, True, hi=len(steps) - 1, key=fits) :]:
            peak, host = self.peak(ask, tiles, some), self.waiting(ask, some)
            yield Plan(some, tiles, peak, host_bytes=host, launches=launches)

    def least(self, ask: Ask, tiles: Grid, target: int | None = None) -> int:
        return self._besides(ask.half, False) + self.leanest(ask, tiles, target)[0]

    def leanest(self, ask: Ask, tiles: Grid, target: int | None = None) -> tuple[int, int]:
        """Return the peak of the leanest plan as `peak` does, and its bytes of host memory."""
        *_, steps = self.steps(ask, tiles)
        return self.peak(ask, tiles, steps, target), self.waiting(ask, steps)

    def peak(self, ask: Ask, tiles: Grid, steps: Steps, target: int | None = None) -> int:
        """Return the peak; where it is more than the target allows, an estimate that is more, too."""
        tile, frame = (tiles.rows.size, tiles.cols.size), (ask.height, ask.width)
        most = math.inf if target is None else target - self._besides(ask.half, False)
        return self._walk.peak(ask.half, ask.latents, steps, frame, tile, ask.rest, self._how(), most)

    def program(self, ask: Ask) -> Program:
        """Return the Program of the component."""
        return getattr(self._model, ask.half).program

    def steps(self, ask: Ask, tiles: Grid) -> Iterator[Steps]:
        """Yield steps from most memory to least."""
        program = self.program(ask)
        if program.piece:
            yield program.fixed(ask.latents)
            return
        single = self._single(ask.half)
        yield from itertools.islice(plain_steps(ask.latents, ask.chunk or int(single)), 1 if single else None)

    def waiting(self, ask: Ask, steps: Steps) -> int:
        """Return the bytes of host memory that waits for a GPU."""
        return 0
