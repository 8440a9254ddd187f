"""Plans of plain torch: chunks, passes of a clip, and what waits in host memory meanwhile."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator

from ..errors import PlanError
from ..network.program import Program
from ..network.steps import Steps, together
from ..network.tiles import Grid
from ..network.values import Size
from ..runtime.pinned import page_locked
from ..system.memory import in_gb
from . import refusals
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
        self._how, self._itemsize = known.how, known.walk.dtype.itemsize

    def check(self, ask: Ask) -> str:
        self.check_noise(ask)
        return check(self._program(ask), ask)

    def of(self, ask: Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        steps = list(self._steps(ask, tiles))

        def fits(some: Steps) -> bool:
            ask.check()
            fixed = self._besides(ask.half, False)
            return target is None or fixed + self.peak(ask, tiles, some, target) <= target

        launches = self._program(ask).launches
        for some in steps[bisect_left(steps, True, hi=len(steps) - 1, key=fits) :]:
            peak, host = self.peak(ask, tiles, some), self._waiting(ask, some)
            yield Plan(some, tiles, peak, host_bytes=host, launches=launches)

    def least(self, ask: Ask, tiles: Grid, target: int | None = None) -> int:
        return self._besides(ask.half, False) + self.leanest(ask, tiles, target)[0]

    def leanest(self, ask: Ask, tiles: Grid, target: int | None = None) -> tuple[int, int]:
        """Return the peak of the leanest plan as `peak` does, and its bytes of host memory."""
        *_, steps = self._steps(ask, tiles)
        return self.peak(ask, tiles, steps, target), self._waiting(ask, steps)

    def peak(self, ask: Ask, tiles: Grid, steps: Steps, target: int | None = None) -> int:
        """Return the peak; where it is more than the target allows, an estimate that is more, too."""
        tile, frame = (tiles.rows.size, tiles.cols.size), (ask.height, ask.width)
        most = math.inf if target is None else target - self._besides(ask.half, False)
        peak = self._walk.peak(ask.half, ask.latents, steps, frame, tile, ask.rest, self._how(), most)
        drawn = self._noise(ask)  # on the device, before the run
        return max(peak, drawn) + drawn * ask.cpu

    def check_noise(self, ask: Ask) -> None:
        """Raise PlanError where the host memory that parked histories may take does not hold the clip's noise."""
        if ask.host and (needs := self._waiting(ask, Steps())) > ask.host:
            raise PlanError(refusals.NOISE.format(needs=in_gb(needs), allowed=in_gb(ask.host)))

    def _program(self, ask: Ask) -> Program:
        return getattr(self._model, ask.half).program

    def _steps(self, ask: Ask, tiles: Grid) -> Iterator[Steps]:
        program = self._program(ask)
        if program.piece:
            yield program.fixed(ask.latents)
            return
        single = self._single(ask.half)
        chunk = ask.chunk or together(program) * single
        yield from itertools.islice(plain_steps(ask.latents, chunk), 1 if single else None)
        if len(tiles) > 1 or ask.chunk > 1 or ask.host == 0:
            return
        for passes in max((step.passes for step in program.steps), key=len)[1:]:
            steps = Steps(ask.latents, program.rates[-1], pieces=True, passes=passes)
            if ask.host is None or self._waiting(ask, steps) <= ask.host:
                yield steps

    def _waiting(self, ask: Ask, steps: Steps) -> int:
        """Return the bytes of host memory that waits for a GPU: the noise, and frames between passes."""
        if ask.cpu:
            return 0
        drawn, size = self._noise(ask), (ask.latents, ask.height, ask.width, self._itemsize, steps.passes)
        parked = sum(s.parked(*size) for s in self._program(ask).steps if len(s.passes) > 1)
        return parked + (page_locked(drawn) if drawn else 0)

    def _noise(self, ask: Ask) -> int:
        """Return the bytes of the noise that a clip begins with, as many values as its pixels have, if it is drawn at
        once."""
        program = self._program(ask)
        if ask.drawn == 0 or not program.noisy:
            return 0
        size = Size(ask.drawn or ask.latents, ask.height, ask.width, program.takes)
        for step in program.steps:
            size = step.size(size, True)
        return size.channels * size.frames * size.height * size.width * self._itemsize
