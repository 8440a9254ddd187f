"""Choose chunks and tiles for a memory target, by dry runs of each candidate (fused_plans, plain_plans)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from .. import log
from ..errors import PlanError
from ..families import own_halves
from ..network.plain import Network
from ..network.program import Program
from ..network.tiles import Grid, grid, shrinking
from ..request import Request, check_frame
from ..runtime.parking import Parking
from ..system.memory import in_gb
from . import refusals
from .ask import Ask
from .besides import besides
from .budget import Limits
from .fused_plans import FusedPlans
from .fused_walk import FusedWalk
from .largest import largest
from .meta import meta_model
from .plain_plans import PlainPlans
from .plain_walk import PlainWalk, Torch, keeps, roomy
from .plan import Plan
from .plans import Known, Plans

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
        self.walk, self.spatial = walk, walk.architecture.spatial
        self._dtype, self._fused, self._how, self._kind, self._waits = walk.dtype, fused, how, kind, waits

    @functools.cached_property
    def _besides(self) -> Callable[[str, bool], int]:
        """Return a function: (component, True where it runs fused) -> bytes in addition to a run's own memory."""
        return functools.cache(functools.partial(besides, self._model, self._waits, self._dtype.itemsize))

    @functools.cached_property
    def _known(self) -> Known:
        walk = self.walk
        plain = PlainWalk(walk.architecture, walk.config, walk.dtype, walk.options.flash_attention)
        here = weakref.proxy(self)  # no cycle: an unused VAE is freed at once
        return Known(
            self._model, walk, plain, self._besides, lambda: here._how(), self._kind, lambda half: here._can_fuse(half)
        )

    @functools.cached_property
    def _fusing(self) -> FusedPlans:
        return FusedPlans(self._known)

    @functools.cached_property
    def _eager(self) -> PlainPlans:
        return PlainPlans(self._known)

    @functools.cached_property
    def _own(self) -> dict[str, Plans]:
        """Return the plans of the components that their family plans itself."""
        return {name: module.Plans(self._known) for name, module in own_halves(self._model, "plans").items()}

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
        ask = Ask(half, *size, request.chunk, request.dtype, band, limits.host, rest, check, request,
                  limits.option, drawn, limits.cpu, limits.beside)  # fmt: skip
        if refusal := self._plans(ask, self._whole(ask)).check(ask):
            return self._in_its_own(ask, limits, request.tiling == "auto", refusal)
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

    def _in_its_own(self, ask: Ask, limits: Limits, raising: bool, refusal: str) -> Plan:
        """Return a plan of a component that divides frames itself, below the target or (`raising`) the raised one."""
        whole, tries = self._whole(ask), limits.tries(raising)
        for limit in tries:
            plan = self._first_fit(ask, whole, limit)
            if plan is not None:
                return self._noted(plan, ask, ask, limits.target, limit, refusals.FOR_OWN_TILES)
        raise PlanError(refusal.format(**self._needs(ask, whole, tries[-1])))

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

    def _noted(
        self, plan: Plan, ask: Ask, used: Ask, target: int | None, limit: int | None, why: str = refusals.FOR_WHOLE
    ) -> Plan:
        """Return the plan with a note on what differs between `ask`, `target` (asked for) and `used`, `limit`; why: the
        reason for a raised target, of plans without blended tiles."""
        notes = []
        if plan.tiled:
            notes += [refusals.APPROXIMATE, self._no_whole(used, limit, refusals.SMALLER)]
        if limit != target:
            why = refusals.NOTHING_SMALLER if plan.tiled else why
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
        quick = target is None or ask.band  # the first option may do, and `_least` takes longer
        least = None if quick else self._least(ask, tiles, target)
        if least is not None and least > target:
            return None
        for option in self._plans(ask, tiles).of(ask, tiles, target):
            ask.check()
            plan = replace(option, peak_bytes=option.peak_bytes + self._besides(ask.half, option.fused))
            if target is None or plan.peak_bytes <= target:
                slack = plan.bare  # steps that launch kernels state theirs
                return roomy(plan, option.peak_bytes, self._how(), target) if slack else plan
        return None

    def _least(self, ask: Ask, tiles: Grid, target: int | None = None) -> int | None:
        """Return `Plans.least`."""
        ask.check()
        return self._plans(ask, tiles).least(ask, tiles, target)

    def _runs_fused(self, ask: Ask, tiles: Grid) -> bool:
        whole = len(tiles) == 1 or (ask.half == "decoder" and not self.walk.late(ask.half))
        return whole and self._can_fuse(ask.half)

    def _can_fuse(self, half: str) -> bool:
        return self._fused() and self.walk.why_not(half) is None

    def _plans(self, ask: Ask, tiles: Grid) -> Plans:
        """Return the plans of the component in these tiles: a family's own, fused ones, or those of plain torch."""
        return self._own.get(ask.half) or (self._fusing if self._runs_fused(ask, tiles) else self._eager)

    def _program(self, half: str) -> Program:
        return getattr(self._model, half).program

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
        fused = self._can_fuse(ask.half)
        if not fused and self._dtype == torch.float32 and ask.host != 0:
            last = refusals.LEANER.format(ways=last)
        if ask.host in (None, 0):
            return last
        if fused:
            _, least = self._fusing.leanest(ask, self._whole(ask))
            device, host = least.device, least.host
        else:
            whole = self._whole(ask)
            device, host = self._plans(ask, whole).leanest(replace(ask, host=None), whole)
        if host <= ask.host:
            return last
        needed = self._besides(ask.half, fused) + device
        more = refusals.MORE_OF_BOTH if target is not None and needed > target else refusals.MORE_RAM
        return more.format(gpu=in_gb(needed), ram=in_gb(host), allowed=in_gb(ask.host), ways=last)

    def _why_no_bands(self, ask: Ask, tiles: Grid, target: int | None) -> str:
        if ask.host == 0 or not self._can_fuse(ask.half):
            return "bands need parked histories, which only the fused kernels on a GPU have"
        least = self._fusing.sizes(ask, tiles, self._fusing.step(ask, 1, 1), Parking(None, 0, rows=ask.band))
        needs = f"{in_gb(self._besides(ask.half, True) + least.device)}, and the target is {ask.told(target)}"
        if ask.host is not None:
            needs += f"; {in_gb(least.host)} of host memory, and ram_gb allows {in_gb(ask.host)}"
        return f"its bands need {needs}"
