"""Choose chunks and tiles for a memory target, by dry runs of each candidate (fused_walk, plain_options,
native_options)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .. import log
from ..errors import InputError, PlanError
from ..network.plain import Network
from ..network.program import Program
from ..network.steps import Steps
from ..network.tiles import Grid, grid, shrinking
from ..request import Request, check_frame
from ..runtime.parking import Parking
from ..system.memory import in_gb
from . import refusals
from .ask import Ask
from .besides import besides
from .budget import Limits
from .cost import MAX_LATENTS, Sizes, clip_work, leanest, quickest_steps, rolling
from .fused_walk import FusedWalk
from .largest import largest
from .meta import meta_model
from .native_options import NativeOptions
from .plain_options import PlainOptions
from .plain_walk import PlainWalk, Torch, keeps, roomy
from .plan import Plan

#: Defaults of `Planner.plan`.
DEFAULT, NONE = Request(), Limits()


class Planner:
    """Planner of one model. Dry runs are cached, so the same question costs nothing the second time."""

    def __init__(
        self, walk: FusedWalk, fused: Callable[[], bool], how: Callable[[], Torch] = Torch, kind: str | None = None,
        waits: bool = False,
    ) -> None:  # fmt: skip
        """Prepare plans for the operands that `walk` packs. fused: returns True where the fused operators run it. how:
        returns the way in which plain torch takes memory. kind: type of 8-bit products that are no convolutions. waits:
        the model's own weights are in host memory until a run reads them."""
        architecture = walk.architecture
        self.walk = walk
        self.spatial, self._temporal = architecture.spatial, architecture.temporal
        self._dtype, self._fused, self._how, self._kind, self._waits = walk.dtype, fused, how, kind, waits
        self._plain = PlainWalk(architecture, walk.config, walk.dtype, walk.options.flash_attention)

    @functools.cached_property
    def _besides(self) -> Callable[[str, bool], int]:
        """Return a function: (component, True where it runs fused) -> bytes in addition to a run's own memory."""
        return functools.cache(functools.partial(besides, self._model, self._waits, self._dtype.itemsize))

    @functools.cached_property
    def _eager(self) -> PlainOptions:
        itemsize = self._dtype.itemsize
        return PlainOptions(self._model, self._plain, self.walk.single, self._besides, self._how, itemsize)

    @functools.cached_property
    def _native(self) -> NativeOptions | None:
        """Return the plans of a self-tiling network; None for others."""
        tiled = self.walk.architecture.own is not None
        return NativeOptions(self._model, self.walk, self._plain, self._kind, self._how) if tiled else None

    @functools.cached_property
    def _model(self) -> Network:
        return meta_model(self.walk.architecture, self.walk.config)

    def plan(
        self, half: str, size: tuple[int, int, int], request: Request = DEFAULT, limits: Limits = NONE,
        rest: tuple[int, int] = (0, 0), check: Callable[[], None] = lambda: None, drawn: int | None = None,
    ) -> Plan:  # fmt: skip
        """Return the plan of a component ("decoder" or "encoder") for latents of this size: T, height, width.

        Args:
            limits: in bytes; they replace the GB of the request.
            rest: an encoder's rows and columns of pixels that fill no latent pixel.
            check: called between dry runs; may raise.
            drawn: latents of the whole clip, if the noise that a decoder begins with is drawn for it at once (None: as
                many as `size` has); 0: it is drawn frame by frame.
        Raises:
            InputError: impossible options.
            PlanError: nothing stays below the target; names the option to change and a value that fits. With "auto"
                only when no plan does, whatever it gives up (`Plan.note`).
        """
        request.check(self.spatial)
        check_frame(self._program(half), *size[1:])
        band = request.tile if request.tiling == "exact" else 0
        ask = Ask(half, *size, request.chunk, request.dtype, band, limits.host, rest, check, limits.option,
                  request.native_blend, request.trained, drawn, limits.cpu, limits.beside)  # fmt: skip
        self._eager.check_noise(ask)
        if self._native is not None:
            return self._own_tiles(ask, request, limits)
        if request.native_blend != DEFAULT.native_blend:
            raise InputError("native_blend is for VAEs that tile themselves (MiniMax H3): leave it out")
        if request.trained:
            raise InputError(refusals.NO_TRAINED_TILES)
        chunk, chunks = request.chunk, self._program(half).chunk
        if chunk and chunks is not None and chunk != chunks[1] and self._fused() and self.walk.why_not(half) is None:
            together = "all of a clip's latents" if self._program(half).waits else f"{chunks[1]} latents at a time"
            log.once(f"chunk={chunk} is not used: this network's norms take {together} together")
        if chunk and self._program(half).piece:
            log.once(f"chunk={chunk} is not used: the pieces that this network takes a clip in are part of the model")
        if request.tiling == "blended":
            return self._blended(ask, request.tile, request.overlap, limits.target)
        if request.tiling == "auto":
            return self._auto(ask, limits)
        return self._untiled(ask, limits.target)

    # -- one way of tiling each --------------------------------------------------------------------------------------

    def _untiled(self, ask: Ask, target: int | None) -> Plan:
        """Return a plan for whole frames, in bands where they are asked for and possible."""
        if ask.band:
            plan = self._first_fit(ask, self._whole(ask), target)
            if plan is not None and plan.parking is not None:
                return plan
            why = self._why_no_bands(ask, self._whole(ask), target)
            log.once(f"tile={ask.band} of exact tiles at {self._size(ask)} is not used: {why}; other plans give the "
                     "same frames")  # fmt: skip
            ask = replace(ask, band=0)
        plan = self._first_fit(ask, self._whole(ask), target)
        if plan is None:
            whole, last = self._whole(ask), refusals.TILED
            refusal = self._long_chunk(ask, [whole], target)
            raise PlanError(refusal or self._with_chunk(ask, whole, lambda a: self._no_whole(a, target, last)))
        return plan

    def _blended(self, ask: Ask, tile: int, overlap: int, target: int | None) -> Plan:
        """Return a plan for tiles of this size in pixels, or (0) for the largest that fit."""
        grids = self._grids(ask, tile, overlap)
        plan = self._fit_tiles(ask, grids, target)
        if plan is not None:
            return plan
        if refusal := self._long_chunk(ask, grids, target):
            raise PlanError(refusal)
        smaller = self._fit_tiles(replace(ask, chunk=0), self._grids(ask, 0, 0), target)
        if tile:
            refusal = refusals.TILE_SMALLER if smaller else refusals.TILE
        else:
            refusal = refusals.SMALLEST_OVERLAP if smaller else self._smallest(ask)
        tiles, names = grids[-1], {"tile_px": tile, "overlap_px": overlap}
        raise PlanError(
            self._with_chunk(ask, tiles, lambda a: refusal.format(**self._needs(a, tiles, target), **names))
        )

    def _own_tiles(self, ask: Ask, request: Request, limits: Limits) -> Plan:
        """Return a plan of a network that tiles itself, below the target or, with "auto", the raised target."""
        if request.trained and getattr(self._program(ask.half), "trained", None) is None:
            raise InputError(refusals.NO_TRAINED_TILES)
        if request.tile or request.chunk or request.tiling in ("exact", "blended"):
            log.once("this network tiles itself, in space and time, which is part of the model: tiles and chunks that "
                     "are asked for are not used")  # fmt: skip
        whole, tries = self._whole(ask), limits.tries(request.tiling == "auto")
        for limit in tries:
            plan = self._first_fit(ask, whole, limit)
            if plan is not None:
                return self._noted(plan, ask, ask, limits.target, limit)
        raise PlanError(refusals.OWN_TILES.format(**self._needs(ask, whole, tries[-1])))

    def _auto(self, ask: Ask, limits: Limits) -> Plan:
        """Return a plan for whole frames below the target, or below the raised target; else for blended tiles."""
        tries = limits.tries(True)
        # A shorter chunk gives the same frames.
        asks = [ask] + ([replace(ask, chunk=0)] if ask.chunk > 1 else [])
        grids = self._grids(ask, 0, DEFAULT.overlap)
        grids += [g for g in self._grids(ask, 0, self.spatial) if g.rows.size < grids[-1].rows.size]
        fits = (lambda a, limit: self._first_fit(a, self._whole(a), limit),
                lambda a, limit: self._fit_tiles(a, grids, limit))  # fmt: skip
        for fit, wishes in zip(fits, (asks, asks[-1:]), strict=True):  # tiles are large rather than chunks long
            for limit in tries:
                for a in wishes:
                    plan = fit(a, limit)
                    if plan is not None:
                        return self._noted(plan, ask, a, limits.target, limit)
        raise PlanError(self._smallest(ask).format(**self._needs(asks[-1], grids[-1], tries[-1])))

    def _noted(self, plan: Plan, ask: Ask, used: Ask, target: int | None, limit: int | None) -> Plan:
        """Return the plan with a note on what differs between `ask`, `target` (asked for) and `used`, `limit`."""
        notes = []
        if plan.tiled:
            notes += [refusals.APPROXIMATE, self._no_whole(used, limit, refusals.SMALLER)]
        if limit != target:
            why = refusals.NOTHING_SMALLER if plan.tiled else refusals.FOR_OWN_TILES if plan.own else refusals.FOR_WHOLE
            notes.append(refusals.RAISED.format(target=ask.told(target), room=in_gb(limit), why=why))
        if used.chunk != ask.chunk:
            notes.append(refusals.CHUNK_UNUSED.format(chunk=ask.chunk))
        raised = limit if limit != target else None
        return replace(plan, raised=raised, note="; ".join(notes))

    # -- what fits ---------------------------------------------------------------------------------------------------

    def _whole(self, ask: Ask) -> Grid:
        s = self.spatial
        return grid(ask.height, ask.width, s * max(ask.height, ask.width), 0, s)

    def _grids(self, ask: Ask, tile: int, overlap: int) -> list[Grid]:
        """Return the grids to try, from large to small tiles."""
        size, s = (ask.height, ask.width), self.spatial
        return [grid(*size, tile, overlap, s)] if tile else list(shrinking(*size, overlap, s))

    def _fit_tiles(self, ask: Ask, grids: list[Grid], target: int | None) -> Plan | None:
        """Return the plan of the largest tiles below the target; None where none is."""
        plan = self._first_fit(ask, grids[0], target)  # histories of whole frames may be parked, those of tiles not
        if plan is not None or len(grids) == 1:
            return plan
        fixed = self._besides(ask.half, self._runs_fused(ask, grids[-1]))
        at = largest(grids, target, fixed, functools.partial(self._least, ask, target=target))
        plans = (self._first_fit(ask, tiles, target) for tiles in grids[at:])
        return next((plan for plan in plans if plan is not None), None)

    def _first_fit(self, ask: Ask, tiles: Grid, target: int | None) -> Plan | None:
        """Return the first, and largest, plan below the target; None where none is."""
        quick = target is None or ask.band or self._native  # the first option may do, and `_least` takes longer
        if not quick and self._least(ask, tiles, target) > target:
            return None
        for option in self._options(ask, tiles, target):
            ask.check()
            plan = replace(option, peak_bytes=option.peak_bytes + self._besides(ask.half, option.fused))
            if target is None or plan.peak_bytes <= target:
                slack = plan.bare  # steps that launch kernels state theirs
                return roomy(plan, option.peak_bytes, self._how(), target) if slack else plan
        return None

    def _least(self, ask: Ask, tiles: Grid, target: int | None = None) -> int:
        """Return the peak of the leanest plan; above the target it is an estimate, but more than the target."""
        ask.check()
        if self._native is not None:
            *_, plan = self._options(ask, tiles, target)
            return self._besides(ask.half, plan.fused) + plan.peak_bytes
        if not self._runs_fused(ask, tiles):
            return self._besides(ask.half, False) + self._eager.leanest(ask, tiles, target)[0]
        *_, steps = self._fused_steps(ask, tiles.rows.size, tiles.cols.size)
        least = self._sizes(ask, tiles, steps, None).device
        if len(tiles) == 1 and ask.host != 0:
            least = min(least, self._leanest(ask, tiles, ask.host)[1].device)
        return self._besides(ask.half, True) + least

    def _leanest(self, ask: Ask, tiles: Grid, host: int | None = None) -> tuple[Parking, Sizes]:
        return leanest(functools.partial(self._sizes, ask, tiles, self._step(ask, 1, 1)), host, self._still(ask))

    def _still(self, ask: Ask) -> bool:
        return self._program(ask.half).style.still

    def _runs_fused(self, ask: Ask, tiles: Grid) -> bool:
        whole = len(tiles) == 1 or (ask.half == "decoder" and not self.walk.late(ask.half))
        return whole and self._can_fuse(ask)

    def _can_fuse(self, ask: Ask) -> bool:
        return self._fused() and self.walk.why_not(ask.half) is None

    def _options(self, ask: Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        """Yield plans from most memory to least; their peaks do not include the weights."""
        rows, cols = tiles.rows.size, tiles.cols.size
        if self._native is not None:
            fused = ask.half == "encoder" and self._can_fuse(ask)
            yield from self._native.of(ask, tiles, fused, self._besides(ask.half, fused), target)
            return
        if self._runs_fused(ask, tiles):
            if not ask.band:
                for steps in self._fused_steps(ask, rows, cols):
                    yield self._fused_plan(ask, tiles, steps, None)
            if len(tiles) == 1 and ask.host != 0:
                yield from self._parking_plans(ask, tiles, target)
            return
        yield from self._eager.of(ask, tiles, target)

    def _fused_steps(self, ask: Ask, rows: int, cols: int) -> Iterator[Steps]:
        """Yield steps from those that fill the GPU down to one frame per step."""
        frames = self.walk.frames_per_step(ask.half, self.spatial * rows, self.spatial * cols)
        while frames:
            yield self._step(ask, -(-frames // self._temporal), frames)
            frames = 0 if self._program(ask.half).piece else frames // 2

    def _step(self, ask: Ask, latents: int, frames: int) -> Steps:
        fixed = self._program(ask.half).fixed(ask.latents)
        if fixed is not None:
            return fixed
        latents = min(ask.chunk or min(latents, MAX_LATENTS), ask.latents)
        if self._temporal == 1:  # pictures of a chunk stay together to the end
            return Steps(latents, 0)
        return Steps(latents, min(frames, self._temporal * latents))

    def _program(self, half: str) -> Program:
        return getattr(self._model, half).program

    def _fused_plan(self, ask: Ask, tiles: Grid, steps: Steps, parking: Parking | None) -> Plan:
        sizes = self._sizes(ask, tiles, steps, parking)
        far, seconds = sizes.far, clip_work(sizes, steps, ask.latents) / self.walk.rates.work
        return Plan(steps, tiles, sizes.device, True, parking, sizes.host, far, seconds, reference=ask.cpu)

    def _sizes(self, ask: Ask, tiles: Grid, steps: Steps, parking: Parking | None) -> Sizes:
        frame = None if len(tiles) == 1 else (ask.height, ask.width)
        size, walk = (tiles.rows.size, tiles.cols.size), self.walk
        clip = ask.latents if self._program(ask.half).gathers else 0
        # All pictures are one clip; after a video clip of one chunk another clip's frames may arrive.
        alone = self._still(ask) and ask.latents <= steps.latents
        return walk.sizes(ask.half, steps.latents, steps.frames, *size, ask.output, frame, parking, ask.rest, clip,
                          alone)  # fmt: skip

    def _parking_plans(self, ask: Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        """Yield the plan with parked histories that is fastest per frame below the target, or else the leanest one."""
        # Histories are copied once per step: more frames per step hide more of the copies, but take more memory.
        sizes = ((4, 8), (2, 8), (2, 4), (1, 4), (2, 2), (1, 2), (1, 1))
        options = list(dict.fromkeys(self._step(ask, *size) for size in sizes))
        if ask.band:
            for steps in options:
                plan = self._fused_plan(ask, tiles, steps, Parking(None, 0, rows=ask.band))
                if ask.host is None or plan.host_bytes <= ask.host:
                    yield plan
            return
        room = None if target is None else target - self._besides(ask.half, True)
        lean, least = self._leanest(ask, tiles, ask.host)
        fits = room is not None and least.device <= room

        def measure(steps: Steps, parking: Parking | None) -> Sizes:
            ask.check()
            return self._sizes(ask, tiles, steps, parking)

        best = quickest_steps(options, measure, ask.latents, room, ask.host) if fits else None
        if best is None and fits and self._still(ask):
            parking = rolling(functools.partial(measure, options[-1]), room)
            best = None if parking is None else (options[-1], parking)
        if best is not None:
            yield self._fused_plan(ask, tiles, *best)
        else:
            yield self._fused_plan(ask, tiles, options[-1], lean)

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _size(self, ask: Ask) -> str:
        return f"{self.spatial * ask.width + ask.rest[1]}x{self.spatial * ask.height + ask.rest[0]}"

    def _needs(self, ask: Ask, tiles: Grid, target: int | None) -> dict[str, str]:
        """Return the fields of every refusal: the frame, its memory in these tiles, the target and the option."""
        needs = in_gb(self._least(ask, tiles))
        return {"size": self._size(ask), "needs": needs, "target": ask.told(target), "option": ask.option}

    def _smallest(self, ask: Ask) -> str:
        program = self._program(ask.half)
        return refusals.SMALLEST_CLIP if keeps(program) or program.gathers else refusals.SMALLEST

    def _no_whole(self, ask: Ask, target: int | None, last: str) -> str:
        """Return a message that says why whole frames do not fit and how they would; `last`: the last remedy."""
        ways = self._ways(ask, target, last)
        return refusals.WHOLE.format(**self._needs(ask, self._whole(ask), target), ways=ways)

    def _long_chunk(self, ask: Ask, grids: list[Grid], target: int | None) -> str:
        """Return a refusal if the chunk that the user chose is the cause, else an empty text."""
        plan = self._fit_tiles(replace(ask, chunk=0), grids, target) if ask.chunk > 1 else None
        if plan is None:
            return ""
        needs = self._needs(ask, grids[-1], target)
        return refusals.CHUNK.format(**needs, chunk=ask.chunk, fits=plan.steps.latents)

    def _with_chunk(self, ask: Ask, tiles: Grid, refusal: Callable[[Ask], str]) -> str:
        """Return the refusal without the user's chunk, and the memory of that chunk where it needs more."""
        shorter = replace(ask, chunk=0)
        needs = self._least(ask, tiles)
        more = refusals.CHUNK_TOO.format(chunk=ask.chunk, needs=in_gb(needs))
        return refusal(shorter) + (f"; {more}" if needs > self._least(shorter, tiles) else "")

    def _ways(self, ask: Ask, target: int | None, last: str) -> str:
        """Return the remedies for whole frames: `last`, after raising ram_gb where parking needs more than allowed."""
        fused = self._can_fuse(ask)
        if not fused and self._dtype == torch.float32 and ask.host != 0:
            last = refusals.LEANER.format(ways=last)
        if ask.host in (None, 0):
            return last
        if fused:
            _, least = self._leanest(ask, self._whole(ask))
            device, host = least.device, least.host
        else:
            device, host = self._eager.leanest(replace(ask, host=None), self._whole(ask))
        if host <= ask.host:
            return last
        needed = self._besides(ask.half, fused) + device
        more = refusals.MORE_OF_BOTH if target is not None and needed > target else refusals.MORE_RAM
        return more.format(gpu=in_gb(needed), ram=in_gb(host), allowed=in_gb(ask.host), ways=last)

    def _why_no_bands(self, ask: Ask, tiles: Grid, target: int | None) -> str:
        if ask.host == 0 or not self._can_fuse(ask):
            return "bands need parked histories, which only the fused kernels on a GPU have"
        least = self._sizes(ask, tiles, self._step(ask, 1, 1), Parking(None, 0, rows=ask.band))
        needs = f"{in_gb(self._besides(ask.half, True) + least.device)}, and the target is {ask.told(target)}"
        if ask.host is not None:
            needs += f"; {in_gb(least.host)} of host memory, and ram_gb allows {in_gb(ask.host)}"
        return f"its bands need {needs}"
