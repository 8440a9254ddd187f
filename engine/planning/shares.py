"""A clip shared among devices: who makes which latents' results, so that all are done at the same time.

Time is counted in latents: what one takes in the middle of a clip on a device of rate 1, by the steps' operations. A
share that does not begin with a clip first takes its steps to where its results begin: the lead.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..network.program import Program, Size
from ..network.tiled import TiledProgram
from ..run.passes import UNKNOWN
from ..run.sections import frames_of, latent_of


@dataclass(frozen=True)
class Share:
    """Latents [first, end) of all clips, one clip behind the other, for the device of this number."""

    device: int
    first: int
    end: int
    lead: float

    def parts(self, latents: int) -> list[tuple[int, int, int]]:
        """(clip, first, end) in clips of `latents`."""
        clips = range(self.first // latents, -(-self.end // latents))
        return [(c, max(self.first - c * latents, 0), min(self.end - c * latents, latents)) for c in clips]


class Leads:
    """What a share takes besides its latents, by its first one within its clip: the lead, less what the clip's first
    latent spares each step that begins with it, being one frame. results: of a latent."""

    def __init__(self, program: Program, height: int, width: int) -> None:
        """height, width: of what goes into the program."""
        self._steps, self.results = program.begins, program.rates[-1]
        self._costs, self._spared = [], []
        size, one = (Size(n, height, width, program.takes) for n in (program.rates[0] * _MIDDLE, 1))
        for step in program.steps:
            self._costs.append(step.work(size, program.style).composed_flop / _MIDDLE)
            self._spared.append(self._costs[-1] - step.work(one, program.style).composed_flop)
            size, one = step.size(size, False), step.size(one, True)
        self._known: dict[int, float] = {}

    def of(self, result: int) -> int:
        """The latent that a result is of."""
        return latent_of(result, self.results)

    def begins(self, latent: int) -> int:
        """The first result of a latent."""
        return frames_of(latent, self.results)

    def __call__(self, first: int) -> float:
        """In latents of the whole network."""
        if first not in self._known:
            steps = zip(self._costs, self._spared, self._steps(frames_of(first, self.results)), strict=True)
            spent = sum(cost * max(0, first - begin) - spared * (begin == 0) for cost, spared, begin in steps)
            self._known[first] = spent / max(sum(self._costs), 1.0)
        return self._known[first]


class SectionLeads:
    """The same of a network that tiles itself: what is shared are its sections, all alike. A decoder's is blended with
    the one before."""

    def __init__(self, program: TiledProgram, latents: int) -> None:
        own, self._decodes = program.own, program.half == "decoder"
        self.results = own.frames if self._decodes else own.latents
        #: Of a clip of so many latents.
        self.count = len(own.sections(latents)) if self._decodes else -(-latents // own.latents)

    def of(self, result: int) -> int:
        """The section that a result is of: the last one has all that follow."""
        return min(result // self.results, self.count - 1)

    def begins(self, section: int) -> int:
        """The first result of a section; behind the last one, more than there are."""
        return self.results * section if section < self.count else UNKNOWN

    def __call__(self, first: int) -> float:
        return float(self._decodes and first > 0)


def leads_of(program: Program, height: int, width: int, latents: int) -> Leads | SectionLeads:
    """height, width: of what goes into the program, for a clip of so many latents."""
    if isinstance(program, TiledProgram):
        return SectionLeads(program, latents)
    return Leads(program, height, width)


#: Latents that the work of a step is taken from.
_MIDDLE = 8
#: Of a share's latents, what its lead may be worth: longer ones would save little.
LEAD_SHARE = 0.04
#: Of the time that the fastest device takes alone; what saves less is not worth others' memory.
WORTH = 0.97


def split(
    leads: Leads | SectionLeads, latents: int, rates: Sequence[float], clips: int = 1, step: int = 1,
    bounds: tuple[int, int] | None = None,
) -> list[Share]:  # fmt: skip
    """Shares of `clips` clips of `latents`, in order, one for a device at most: those that end soonest.

    rates: of the devices, relative. step: latents that shares begin with a multiple of, where chunks of the whole clip
    begin. bounds: [first, end) of what is to be shared, else all.
    """
    first, last = bounds or (0, clips * latents)

    def within(time: float) -> list[Share]:
        shares, at = [], first
        for device, rate in enumerate(rates):
            lead = leads(at % latents)
            room = time * rate - lead
            end = last if at + room >= last else int(at + room + 1e-9) // step * step
            if at < last and end > at:
                shares.append(Share(device, at, end, lead))
                at = end
        return shares if at >= last else []

    most = (last - first + leads(first % latents)) / max(rates)
    device = max(range(len(rates)), key=rates.__getitem__)
    alone = [Share(device, first, last, leads(first % latents))]
    ticks = 1 << 12
    tick = bisect.bisect_left(range(1, ticks + 1), True, key=lambda n: bool(within(most * n / ticks)))
    shares = within(most * (tick + 1) / ticks) if tick < ticks else []
    return shares if shares and duration(shares, rates) < WORTH * duration(alone, rates) else alone


def in_rounds(
    leads: Leads | SectionLeads, latents: int, rates: Sequence[float], step: int, bounds: tuple[int, int], room: int,
    window: int,
) -> list[Share]:  # fmt: skip
    """As `split` of one clip, over and over, no `window` shares behind each other larger than `room` latents. One
    device has all where this does not save time, or cannot be."""
    most = room // window
    while most > 0:
        shares = _rounds(leads, latents, rates, step, bounds, most)
        held = max(sum(s.end - s.first for s in shares[i : i + window]) for i in range(len(shares)))
        if held <= room or len(shares) == 1:
            return shares
        # They begin with chunks, and those of a fast device are larger than others.
        most = min(most - 1, most * room // held)
    return [_alone(leads, rates, bounds)]


def _alone(leads: Leads | SectionLeads, rates: Sequence[float], bounds: tuple[int, int]) -> Share:
    device = max(range(len(rates)), key=rates.__getitem__)
    return Share(device, *bounds, leads(bounds[0]))


def _rounds(
    leads: Leads | SectionLeads, latents: int, rates: Sequence[float], step: int, bounds: tuple[int, int], most: int
) -> list[Share]:
    """Shares of about `most` latents, or of so many that their leads are a LEAD_SHARE of them, if that is less."""
    first, last = bounds
    size = max(step, min(most, math.ceil(leads(last) / LEAD_SHARE)) * len(rates))
    size = math.ceil((last - first) / math.ceil((last - first) / size) / step) * step
    spans = [(a, min(a + size, last)) for a in range(first, last, size)]
    found = [split(leads, latents, rates, 1, step, span) for span in spans]
    alone = [_alone(leads, rates, bounds)]
    spent = sum(duration(shares, rates) for shares in found)
    return [share for shares in found for share in shares] if spent < WORTH * duration(alone, rates) else alone


def duration(shares: Sequence[Share], rates: Sequence[float]) -> float:
    """Until the last one is done."""
    return max((s.end - s.first + s.lead) / rates[s.device] for s in shares)
