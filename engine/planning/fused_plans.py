"""Plans of the fused operators: chunks, frames per step, and what of the histories is parked."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from .. import log
from ..network.program import Program
from ..network.steps import Steps
from ..network.tiles import Grid
from ..runtime.parking import Parking
from .ask import Ask
from .cost import MAX_LATENTS, Sizes, clip_work, leanest, quickest_steps, rolling
from .plan import Plan
from .plans import Known, check


class FusedPlans:
    """Plans of one model on the fused operators."""

    def __init__(self, known: Known) -> None:
        self._model, self._walk, self._besides = known.model, known.walk, known.besides
        architecture = known.walk.architecture
        self._spatial, self._temporal = architecture.spatial, architecture.temporal

    def check(self, ask: Ask) -> str:
        program, chunk = self._program(ask), ask.chunk
        if chunk and program.chunk is not None and chunk != program.chunk[1]:
            together = "all of a clip's latents" if program.waits else f"{program.chunk[1]} latents at a time"
            log.once(f"chunk={chunk} is not used: this network's norms take {together} together")
        return check(program, ask)

    def of(self, ask: Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        if not ask.band:
            for steps in self._steps(ask, tiles):
                yield self._plan(ask, tiles, steps, None)
        if len(tiles) == 1 and ask.host != 0:
            yield from self._parked(ask, tiles, target)

    def least(self, ask: Ask, tiles: Grid, target: int | None = None) -> int:
        *_, steps = self._steps(ask, tiles)
        least = self.sizes(ask, tiles, steps, None).device
        if len(tiles) == 1 and ask.host != 0:
            least = min(least, self.leanest(ask, tiles, ask.host)[1].device)
        return self._besides(ask.half, True) + least

    def leanest(self, ask: Ask, tiles: Grid, host: int | None = None) -> tuple[Parking, Sizes]:
        """Return the parking of whole frames that needs the least memory on the device, with its sizes; host: most
        bytes of host memory (None: no limit)."""
        return leanest(functools.partial(self.sizes, ask, tiles, self.step(ask, 1, 1)), host, self._still(ask))

    def step(self, ask: Ask, latents: int, frames: int) -> Steps:
        """Return the steps of at most so many latents and frames that the component and the request allow."""
        fixed = self._program(ask).fixed(ask.latents)
        if fixed is not None:
            return fixed
        latents = min(ask.chunk or min(latents, MAX_LATENTS), ask.latents)
        if self._temporal == 1:  # pictures of a chunk stay together to the end
            return Steps(latents, 0)
        return Steps(latents, min(frames, self._temporal * latents))

    def sizes(self, ask: Ask, tiles: Grid, steps: Steps, parking: Parking | None) -> Sizes:
        """Return the sizes of a run, in addition to the weights."""
        frame = None if len(tiles) == 1 else (ask.height, ask.width)
        size, walk = (tiles.rows.size, tiles.cols.size), self._walk
        clip = ask.latents if self._program(ask).gathers else 0
        # All pictures are one clip; after a video clip of one chunk another clip's frames may arrive.
        alone = self._still(ask) and ask.latents <= steps.latents
        return walk.sizes(ask.half, steps.latents, steps.frames, *size, ask.output, frame, parking, ask.rest, clip,
                          alone)  # fmt: skip

    def _program(self, ask: Ask) -> Program:
        return getattr(self._model, ask.half).program

    def _still(self, ask: Ask) -> bool:
        return self._program(ask).style.still

    def _steps(self, ask: Ask, tiles: Grid) -> Iterator[Steps]:
        """Yield steps from those that fill the GPU down to one frame per step."""
        sides = (self._spatial * n for n in (tiles.rows.size, tiles.cols.size))
        frames = self._walk.frames_per_step(ask.half, *sides)
        while frames:
            yield self.step(ask, -(-frames // self._temporal), frames)
            frames = 0 if self._program(ask).piece else frames // 2

    def _plan(self, ask: Ask, tiles: Grid, steps: Steps, parking: Parking | None) -> Plan:
        sizes = self.sizes(ask, tiles, steps, parking)
        far, seconds = sizes.far, clip_work(sizes, steps, ask.latents) / self._walk.rates.work
        return Plan(steps, tiles, sizes.device, True, parking, sizes.host, far, seconds, reference=ask.cpu)

    def _parked(self, ask: Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        """Yield the plan with parked histories that is fastest per frame below the target, or else the leanest one."""
        # Histories are copied once per step: more frames per step hide more of the copies, but take more memory.
        sizes = ((4, 8), (2, 8), (2, 4), (1, 4), (2, 2), (1, 2), (1, 1))
        options = list(dict.fromkeys(self.step(ask, *size) for size in sizes))
        if ask.band:
            for steps in options:
                plan = self._plan(ask, tiles, steps, Parking(None, 0, rows=ask.band))
                if ask.host is None or plan.host_bytes <= ask.host:
                    yield plan
            return
        room = None if target is None else target - self._besides(ask.half, True)
        lean, least = self.leanest(ask, tiles, ask.host)
        fits = room is not None and least.device <= room

        def measure(steps: Steps, parking: Parking | None) -> Sizes:
            ask.check()
            return self.sizes(ask, tiles, steps, parking)

        best = quickest_steps(options, measure, ask.latents, room, ask.host) if fits else None
        if best is None and fits and self._still(ask):
            parking = rolling(functools.partial(measure, options[-1]), room)
            best = None if parking is None else (options[-1], parking)
        if best is not None:
            yield self._plan(ask, tiles, *best)
        else:
            yield self._plan(ask, tiles, options[-1], lean)
