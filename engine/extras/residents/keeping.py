"""Choose a plan by its whole cost: its own time, and that of bringing back what it has moved off the card."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ... import log
from ...errors import PlanError
from ...planning import refusals
from ...planning.budget import Limits, Machine
from ...planning.plan import Plan
from ...request import Request
from ...system.memory import in_gb
from .link import Link
from .residents import Card

#: Models that stay on the card: those that cost more to bring back, all if an exact plan allows it, none in the way.
KEEP = ("auto", "always", "never")
#: Parts of the bytes that the quickest plan moves out, for which another plan is tried.
PARTS = (0.0, 0.5)
#: Bytes of host memory a second that are page-locked for what a plan parks there: it is free again after the run (4 GiB
#: take 0.5 s with 16 cores).
LOCKED = 8 << 30
#: Times that the bytes are halved which the leanest plan is found to move out.
HALVINGS = 5


@dataclass(frozen=True)
class Kept:
    """A plan among the models of a card.

    needs: bytes of the card that are to be free for it. out: bytes of models that leave for it. seconds: until these
    are back. note: why not all models stay that were to; "" where they do.
    """

    plan: Plan
    needs: int
    out: int = 0
    seconds: float = 0.0
    note: str = ""


class Keeping:
    """Plans of one clip among the models of a card."""

    def __init__(
        self, plan: Callable[[Request, Limits], Plan], latents: int, clips: int, request: Request, machine: Machine,
        card: Card,
    ) -> None:  # fmt: skip
        """Prepare the choice.

        Args:
            plan: plans the clip; raises PlanError where nothing fits.
            latents: of a clip, of which there are `clips`.
            machine: with an empty card.
            card: with its models.
        """
        self._plan, self._request, self._machine, self._card = plan, request, machine, card
        self._latents, self._clips = latents, clips

    def choose(self, keep: str, link: Callable[[], Link]) -> Kept:
        """Return the plan to follow.

        Args:
            keep: one of `KEEP`.
            link: returns the speeds at which models come back; it is asked where something is to leave.
        Raises:
            PlanError: nothing fits, even on an empty card.
        """
        alone = self._moving(self._plan(self._request, self._machine.limits(self._request)))
        if not self._card.models or alone.needs <= self._card.free:
            return alone
        # Which tiles blend depends on the target: frames would depend on what else is on the card.
        if alone.plan.tiled or self._request.tiling == "blended":
            note = refusals.TILES_MOVE if keep == "always" and alone.out else ""
            return replace(self._priced(alone, link()), note=note)
        most = self._card.leaves
        if alone.needs > self._card.free + most:
            alone = self._within(most) or alone
        if keep == "never":
            return self._priced(alone, link())
        if keep == "always":
            return self._priced(self._leanest(alone), link())
        speeds, ways = link(), [alone]
        found = [way for part in PARTS if (way := self._within(int(part * alone.out))) is not None]
        ways += [way for way in found if _comparable(way.plan, alone.plan)]
        # Where it costs the same, what can stay does.
        return min((self._priced(way, speeds) for way in ways), key=lambda way: (self._whole(way, speeds), way.out))

    def _whole(self, way: Kept, link: Link) -> float:
        """Return the whole cost of a plan in seconds."""
        return self._clips * run_seconds(way.plan, self._latents, link) + way.plan.host_bytes / LOCKED + way.seconds

    def _priced(self, way: Kept, link: Link) -> Kept:
        return replace(way, seconds=self._card.seconds(way.out, link))

    def _moving(self, plan: Plan) -> Kept:
        """Return a plan with what it moves out."""
        card = self._card
        needs = card.needs(plan.peak_bytes, self._machine.spare(not self._request.vram_gb))
        return Kept(plan, needs, min(max(0, needs - card.free), card.leaves))

    def _within(self, out: int) -> Kept | None:
        """Return the exact plan for the card with so many bytes of models moved out; None where there is none."""
        card, request = self._card, self._request
        held = replace(self._machine, others=max(0, self._machine.card - card.free - card.own - out))
        if request.tiling == "auto":
            request = replace(request, tiling="untiled")
        try:
            with log.silent():  # it may never run
                return self._moving(self._plan(request, held.limits(request)))
        except PlanError:
            return None

    def _leanest(self, alone: Kept) -> Kept:
        """Return the exact plan that moves the fewest bytes out."""
        best, low, high = self._within(0), 0, alone.out
        if best is None:
            best = alone
            for _ in range(HALVINGS):
                part = (low + high) // 2
                found = self._within(part)
                low, high, best = (part, high, best) if found is None else (low, part, found)
        return replace(best, note=refusals.NOT_ALL_STAY.format(out=in_gb(best.out))) if best.out else best


def _comparable(plan: Plan, quick: Plan) -> bool:
    """Check that it is known how much longer a plan takes than the quickest one: plain torch's chunks have no times."""
    return plan.seconds > 0 or plan.steps.passes > 1 or plan.steps == quick.steps


def run_seconds(plan: Plan, latents: int, link: Link) -> float:
    """Return the seconds of a clip: those of the plan's rates, or of its copies at the speed of this link."""
    far = plan.far_bytes * -(-latents // plan.steps.unit)
    passes = plan.host_bytes * (plan.steps.passes - 1)  # what waited between two comes back; it went out beside work
    return max(plan.seconds, (far + passes) / link.pinned)


def crossing(lean: Plan, quick: Plan, latents: int, seconds: float, link: Link) -> float:
    """Return the latents of a clip from which the quicker plan, for which models are moved, takes less in all; inf
    where it never does.

    Args:
        lean, quick: plans for a clip of `latents`; their times grow with its length.
        seconds: cost of the move.
        link: speeds of copies.
    """
    gain = (run_seconds(lean, latents, link) - run_seconds(quick, latents, link)) / latents
    seconds -= (lean.host_bytes - quick.host_bytes) / LOCKED
    if seconds <= 0 <= gain:
        return 0.0
    return seconds / gain if gain > 0 else math.inf
