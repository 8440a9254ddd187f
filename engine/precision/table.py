"""What was measured of one half of a VAE, and the choice of 8-bit convolutions that follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..operands.policy import WIDEST, Policy, Ranges, ranges_as_dict, ranges_from_dict, united


@dataclass(frozen=True)
class Table:
    """Measurements of an encoder or decoder, by convolution key.

    ranges: of the inputs; work: operations per clip, all convolutions; errors: per kind, the mean square error in
    pixels (-1..1) that a convolution alone makes with 8-bit operands. source: what it was measured on. seen: ranges of
    each clip that uncalibrated ones come from, by its name; none if they are calibrated. levels: root mean square of
    what went in, of each clip that is known; none in tables that do not say it.
    """

    source: str
    ranges: Ranges
    work: Mapping[str, int]
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seen: Mapping[str, Ranges] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def first(cls, clip: str, measured: Table) -> Table:
        """Of a file that is not calibrated, from the table of its first clip."""
        return replace(measured, source="this file's first clip", seen={clip: measured.ranges},
                       levels=measured._level_as(clip))  # fmt: skip

    def widened(self, clip: str, measured: Table) -> Table:
        """With the table of another clip as well. A clip far beyond the scale of the others leaves their ranges as they
        are: int8 would have a part of its steps left for all of them."""
        seen = {**self.seen, clip: measured.ranges}
        more = replace(self, seen=seen, levels={**self.levels, **measured._level_as(clip)})
        return replace(more, ranges=united(more.usual), source=f"this file's first {len(seen)} clips")

    @property
    def usual(self) -> list[Ranges]:
        """Return the ranges of each clip seen that is not far beyond the scale of the others."""
        return [ranges for name, ranges in self.seen.items() if not self.beyond(self.levels.get(name, 0.0))]

    def _level_as(self, clip: str) -> dict[str, float]:
        return dict(zip([clip], self.levels.values(), strict=False))

    def beyond(self, level: float) -> bool:
        """Whether a clip of this level is far beyond the scale of the known ones. Of two that are far apart, the lower
        one counts; nothing is where no level is known."""
        known = sorted(self.levels.values())
        return bool(known) and level > WIDEST * known[(len(known) - 1) // 2]

    def on(self, clip: str) -> Table:
        """For a run on this clip: what was seen of it fits, however odd it is."""
        return self.with_ranges(self.seen.get(clip, {}))

    def with_ranges(self, own: Ranges) -> Table:
        """For a run on a clip of these ranges."""
        return replace(self, ranges={k: r.united(own[k]) if k in own else r for k, r in self.ranges.items()})

    def with_errors(self, kind: str, errors: Mapping[str, float]) -> Table:
        return replace(self, errors={**self.errors, kind: dict(errors)})

    def fits(self, keys: Iterable[str]) -> bool:
        """Whether it knows all these convolutions."""
        return all(key in self.ranges and key in self.work for key in keys)

    def share(self, keys: Iterable[str]) -> float:
        """Part of all operations that these convolutions do."""
        return sum(self.work[key] for key in keys) / max(sum(self.work.values()), 1)

    def choose(self, kind: str, budget: float) -> Policy:
        """As much work in 8 bit as a mean square error of `budget` allows, if errors simply add up."""
        errors = self.errors[kind]
        chosen, spent = {}, 0.0
        for key in sorted(errors, key=lambda k: errors[k] / max(self.work[k], 1)):
            if spent + errors[key] <= budget:
                chosen[key] = kind
                spent += errors[key]
        return Policy(chosen, self.ranges)

    def stricter(self, policy: Policy, kind: str, factor: float) -> Policy:
        """A choice among the policy's convolutions with at most `factor` of its error, and at least one fewer."""
        errors = {key: self.errors[kind][key] for key in policy.kinds}
        least = replace(self, errors={kind: errors}).choose(kind, factor * sum(errors.values()))
        if len(least.kinds) < len(errors):
            return least
        worst = max(errors, key=errors.__getitem__)
        return Policy({k: kind for k in errors if k != worst}, self.ranges)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "work": dict(self.work),
            "ranges": ranges_as_dict(self.ranges),
            "errors": {kind: {k: float(f"{e:.3g}") for k, e in each.items()} for kind, each in self.errors.items()},
            "seen": {clip: ranges_as_dict(ranges) for clip, ranges in self.seen.items()},
            "levels": dict(self.levels),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Table:
        """Raises KeyError, TypeError, ValueError or AttributeError on anything that `as_dict` did not make."""
        errors = {kind: {k: float(e) for k, e in each.items()} for kind, each in values["errors"].items()}
        work = {key: int(n) for key, n in values["work"].items()}
        if not all(math.isfinite(e) for each in errors.values() for e in each.values()):
            raise ValueError("its errors are not finite")
        seen = {clip: ranges_from_dict(ranges) for clip, ranges in values.get("seen", {}).items()}
        levels = {clip: float(level) for clip, level in values.get("levels", {}).items()}
        if not all(map(math.isfinite, levels.values())):
            raise ValueError("its levels are not finite")
        return cls(str(values["source"]), ranges_from_dict(values["ranges"]), work, errors, seen, levels)
