"""Divide a clip among devices so that all finish at the same time.

Time is counted in latents: the unit is the time of one latent in the middle of a clip on a device of rate 1, by the
steps' operations. A share that does not begin with a clip first brings its steps to where its results begin: the
warm-up (`lead`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...network.program import Program
from ...network.sectioned import latent_at, results_before
from ...network.steps import UNKNOWN
from ...network.values import Size


@dataclass(frozen=True)
class Share:
    """Latents [first, end) of all clips, one clip after the other, for the device of this number; lead: warm-up."""

    device: int
    first: int
    end: int
    lead: float

    def parts(self, latents: int) -> list[tuple[int, int, int]]:
        """Return the share's parts as (clip, first, end) latents within clips of `latents`."""
        clips = range(self.first // latents, -(-self.end // latents))
        return [(c, max(self.first - c * latents, 0), min(self.end - c * latents, latents)) for c in clips]


class Leads:
    """Warm-up time of a share, by its first latent within its clip.

    Steps that begin with the clip save time, because its first latent is one frame: that is subtracted. results: number
    of a latent's results. tail: latents after a share that it computes, too, as far as the clip has so many."""

    def __init__(self, program: Program, height: int, width: int) -> None:
        """Compute the operations of each step; height, width: of the program's input."""
        self._program, self._steps, self.results = program, program.begins, program.rates[-1]
        self.tail = float(program.reach[1]) if any(step.bounded for step in program.steps) else 0.0
        self._costs, self._spared = [], []
        size, one = (Size(n, height, width, program.takes) for n in (program.rates[0] * _MIDDLE, 1))
        for step in program.steps:
            self._costs.append(step.work(size, program.style).composed_flop / _MIDDLE)
            self._spared.append(self._costs[-1] - step.work(one, program.style).composed_flop)
            size, one = step.size(size, False), step.size(one, True)
        self._known: dict[int, float] = {}

    def of(self, result: int) -> int:
        """Return the latent that a result belongs to."""
        return latent_at(self._program, result, self.results)

    def begins(self, latent: int) -> int:
        """Return the first result of a latent."""
        return results_before(self._program, latent, self.results)

    def __call__(self, first: int) -> float:
        """Return the warm-up of a share that begins with this latent, in latents of the whole network."""
        if first not in self._known:
            steps = zip(self._costs, self._spared, self._steps(self.begins(first)), strict=True)
            spent = sum(cost * max(0, first - begin) - spared * (begin == 0) for cost, spared, begin in steps)
            self._known[first] = spent / max(sum(self._costs), 1.0)
        return self._known[first]


class SectionLeads:
    """Warm-up time for a self-tiling network, which is shared by sections, all of the same cost.

    A decoder's section is blended with the previous one, so a share that begins later makes one section more."""

    tail = 0.0

    def __init__(self, program: Program, latents: int) -> None:
        self._decodes = program.half == "decoder"
        #: Results of a section, and sections of a clip of so many latents.
        self.results, self.count = program.alone(latents)

    def of(self, result: int) -> int:
        """Return the section that a result belongs to; the last section has all further results."""
        return min(result // self.results, self.count - 1)

    def begins(self, section: int) -> int:
        """Return the first result of a section; after the last section, a number larger than any result's."""
        return self.results * section if section < self.count else UNKNOWN

    def __call__(self, first: int) -> float:
        return float(self._decodes and first > 0)


def leads_of(program: Program, height: int, width: int, latents: int) -> Leads | SectionLeads:
    """Return the warm-up times of a program.

    Args:
        program: of a component.
        height, width: of its input.
        latents: of the clip.
    """
    if program.alone(latents) is not None:
        return SectionLeads(program, latents)
    return Leads(program, height, width)


#: Latents of the clip whose operations give the work of a step.
_MIDDLE = 8
#: Warm-up as a part of a share's latents up to which shares are made longer: longer ones would save little.
LEAD_SHARE = 0.04
#: Part of the time of the fastest device alone that sharing must stay below; less is not worth the others' memory.
WORTH = 0.97


def split(
    leads: Leads | SectionLeads, latents: int, rates: Sequence[float], clips: int = 1, step: int = 1,
    bounds: tuple[int, int] | None = None,
) -> list[Share]:  # fmt: skip
    """Return the shares that end soonest, in order, at most one for each device.

    The fastest device has everything where sharing does not save enough (WORTH).

    Args:
        leads: warm-up times.
        latents: of a clip.
        rates: relative speeds of the devices.
        clips: number of clips.
        step: shares begin with a multiple of this many latents, where chunks of the whole clip begin.
        bounds: latents [first, end) to be shared; None: all.
    """
    first, last = bounds or (0, clips * latents)

    def within(time: float) -> list[Share]:
        shares, at = [], first
        for device, rate in enumerate(rates):
            lead = leads(at % latents)
            most = at + time * rate - lead
            end = last if most >= last else int(most - leads.tail + 1e-9) // step * step
            if leads.tail and most < last:  # up to the end of a clip there is none
                end = max(end, int(most + 1e-9) // latents * latents)
            if at < last and end > at:
                shares.append(Share(device, at, end, lead + min(leads.tail, -end % latents)))
                at = end
        return shares if at >= last else []

    most = (last - first + leads(first % latents)) / max(rates)
    alone = [_alone(leads, latents, rates, (first, last))]
    ticks = 1 << 12
    tick = bisect.bisect_left(range(1, ticks + 1), True, key=lambda n: bool(within(most * n / ticks)))
    shares = within(most * (tick + 1) / ticks) if tick < ticks else []
    return shares if shares and duration(shares, rates) < WORTH * duration(alone, rates) else alone


def in_rounds(
    leads: Leads | SectionLeads, latents: int, rates: Sequence[float], step: int, bounds: tuple[int, int], room: int,
    window: int,
) -> list[Share]:  # fmt: skip
    """Return shares of one clip in several rounds, each divided as `split` does.

    No `window` consecutive shares have more than `room` latents together. The fastest device has everything where this
    does not save time or is impossible.

    Args:
        leads: warm-up times.
        latents: of the clip.
        rates: relative speeds of the devices.
        step: shares begin with a multiple of this many latents.
        bounds: latents [first, end) to be shared.
        room, window: the limit above.
    """
    most = room // window
    while most > 0:
        shares = _rounds(leads, latents, rates, step, bounds, most)
        held = max(sum(s.end - s.first for s in shares[i : i + window]) for i in range(len(shares)))
        if held <= room or len(shares) == 1:
            return shares
        # Shares begin with chunks, and those of a fast device are larger than others.
        most = min(most - 1, most * room // held)
    return [_alone(leads, latents, rates, bounds)]


def _alone(leads: Leads | SectionLeads, latents: int, rates: Sequence[float], bounds: tuple[int, int]) -> Share:
    device = max(range(len(rates)), key=rates.__getitem__)
    return Share(device, *bounds, leads(bounds[0] % latents))


def _rounds(
    leads: Leads | SectionLeads, latents: int, rates: Sequence[float], step: int, bounds: tuple[int, int], most: int
) -> list[Share]:
    """Return shares of about `most` latents, or of fewer if their warm-up is a LEAD_SHARE of them even then."""
    first, last = bounds
    size = max(step, min(most, math.ceil(leads(last) / LEAD_SHARE)) * len(rates))
    size = math.ceil((last - first) / math.ceil((last - first) / size) / step) * step
    spans = [(a, min(a + size, last)) for a in range(first, last, size)]
    found = [split(leads, latents, rates, 1, step, span) for span in spans]
    alone = [_alone(leads, latents, rates, bounds)]
    spent = sum(duration(shares, rates) for shares in found)
    return [share for shares in found for share in shares] if spent < WORTH * duration(alone, rates) else alone


def duration(shares: Sequence[Share], rates: Sequence[float]) -> float:
    """Return the time until the last share is done."""
    return max((s.end - s.first + s.lead) / rates[s.device] for s in shares)
