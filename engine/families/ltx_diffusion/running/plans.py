"""Plans of the decoder: passes of a clip, and what waits in host memory meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from ....errors import PlanError
from ....network.steps import Steps
from ....network.tiles import Grid
from ....network.values import Size
from ....planning import refusals
from ....planning.ask import Ask
from ....planning.cost import plain_steps
from ....planning.plain_plans import PlainPlans
from ....runtime.pinned import page_locked
from ....system.memory import in_gb
from ..diffusion import NeighbourDecoder
from ..neighbours import GROUP


class Plans(PlainPlans):
    """Plans of a decoder that begins with noise and can take a clip in several passes."""

    def check(self, ask: Ask) -> str:
        """Refuse a clip whose noise the host memory that parked histories may take does not hold, too."""
        if ask.host and (needs := self.waiting(ask, Steps())) > ask.host:
            raise PlanError(refusals.NOISE.format(needs=in_gb(needs), allowed=in_gb(ask.host)))
        return super().check(ask)

    def peak(self, ask: Ask, tiles: Grid, steps: Steps, target: int | None = None) -> int:
        drawn = self._noise(ask)  # on the device, before the run
        return max(super().peak(ask, tiles, steps, target), drawn) + drawn * ask.cpu

    def steps(self, ask: Ask, tiles: Grid) -> Iterator[Steps]:
        yield next(plain_steps(ask.latents, ask.chunk or GROUP))
        if len(tiles) > 1 or ask.chunk > 1 or ask.host == 0:
            return
        for passes in self._step(ask).passes[1:]:
            steps = Steps(ask.latents, self.program(ask).rates[-1], pieces=True, passes=passes)
            if ask.host is None or self.waiting(ask, steps) <= ask.host:
                yield steps

    def waiting(self, ask: Ask, steps: Steps) -> int:
        """Return the bytes of the noise in host memory, and of frames between passes."""
        if ask.cpu:
            return 0
        drawn = self._noise(ask)
        parked = self._step(ask).parked(ask.latents, ask.height, ask.width, self.itemsize, steps.passes)
        return parked + (page_locked(drawn) if drawn else 0)

    def _step(self, ask: Ask) -> NeighbourDecoder:
        return self.program(ask).steps[-1]  # type: ignore[return-value]

    def _noise(self, ask: Ask) -> int:
        """Return the bytes of the noise that a clip begins with, as many values as its pixels have, if it is drawn at
        once."""
        program = self.program(ask)
        if ask.drawn == 0:
            return 0
        size = Size(ask.drawn or ask.latents, ask.height, ask.width, program.takes)
        for step in program.steps:
            size = step.size(size, True)
        return size.channels * size.frames * size.height * size.width * self.itemsize
