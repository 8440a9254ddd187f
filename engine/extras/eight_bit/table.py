"""Measurements of one component of a VAE, and the choice of 8-bit convolutions that follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...precision.policy import WIDEST, Policy, Ranges, ranges_as_dict, ranges_from_dict, united


@dataclass(frozen=True)
class Table:
    """Measurements of an encoder or decoder, by convolution key.

    ranges: of the inputs. work: operations per clip, for all convolutions. errors: for each kind, the mean square error
    in pixels (-1..1) that a convolution makes if it alone has 8-bit operands. source: description of the clips that
    were measured. seen: clip name -> its ranges, for uncalibrated tables; empty if they are calibrated. levels: clip
    name -> root mean square of the component's input; empty in tables that do not store it.
    """

    source: str
    ranges: Ranges
    work: Mapping[str, int]
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seen: Mapping[str, Ranges] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def first(cls, clip: str, measured: Table) -> Table:
        """Return the table of a file that is not calibrated, from the measurements of its first clip."""
        return replace(measured, source="this file's first clip", seen={clip: measured.ranges},
                       levels=measured._level_as(clip))  # fmt: skip

    def widened(self, clip: str, measured: Table) -> Table:
        """Return the table widened by the measurements of another clip.

        A clip far beyond the scale of the others leaves their ranges unchanged: int8 would have only a part of its
        steps left for all of them."""
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
        """Check if a clip of this level is far beyond the scale of the known ones: more than WIDEST times their median.

        Of two levels that are far apart the lower one counts. False where no level is known."""
        known = sorted(self.levels.values())
        return bool(known) and level > WIDEST * known[(len(known) - 1) // 2]

    def on(self, clip: str) -> Table:
        """Return the table for a run on this clip, with ranges that include all that was seen of it."""
        return self.with_ranges(self.seen.get(clip, {}))

    def with_ranges(self, own: Ranges) -> Table:
        """Return the table for a run on a clip of these ranges, which its own ranges are united with."""
        return replace(self, ranges={k: r.united(own[k]) if k in own else r for k, r in self.ranges.items()})

    def with_errors(self, kind: str, errors: Mapping[str, float]) -> Table:
        """Return the table with these errors of `kind`."""
        return replace(self, errors={**self.errors, kind: dict(errors)})

    def fits(self, keys: Iterable[str]) -> bool:
        """Check that the table has ranges and work of all these convolutions."""
        return all(key in self.ranges and key in self.work for key in keys)

    def share(self, keys: Iterable[str]) -> float:
        """Return the part of all operations (0..1) that these convolutions do."""
        return sum(self.work[key] for key in keys) / max(sum(self.work.values()), 1)

    def choose(self, kind: str, budget: float) -> Policy:
        """Return a policy with as much work in 8 bit as a mean square error of `budget` allows, if errors add up."""
        errors = self.errors[kind]
        chosen, spent = {}, 0.0
        for key in sorted(errors, key=lambda k: errors[k] / max(self.work[k], 1)):
            if spent + errors[key] <= budget:
                chosen[key] = kind
                spent += errors[key]
        return Policy(chosen, self.ranges)

    def stricter(self, policy: Policy, kind: str, factor: float) -> Policy:
        """Return a policy with a part of another's convolutions, at least one fewer.

        Its error is at most `factor` times that of `policy`. Where that would keep all, only the worst is left out."""
        errors = {key: self.errors[kind][key] for key in policy.kinds}
        least = replace(self, errors={kind: errors}).choose(kind, factor * sum(errors.values()))
        if len(least.kinds) < len(errors):
            return least
        worst = max(errors, key=errors.__getitem__)
        return Policy({k: kind for k in errors if k != worst}, self.ranges)

    def as_dict(self) -> dict[str, Any]:
        """Return the table as a dictionary for JSON."""
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
        """Return the table of a dictionary from `as_dict`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is not one that `as_dict` made.
        """
        errors = {kind: {k: float(e) for k, e in each.items()} for kind, each in values["errors"].items()}
        work = {key: int(n) for key, n in values["work"].items()}
        if not all(math.isfinite(e) for each in errors.values() for e in each.values()):
            raise ValueError("its errors are not finite")
        seen = {clip: ranges_from_dict(ranges) for clip, ranges in values.get("seen", {}).items()}
        levels = {clip: float(level) for clip, level in values.get("levels", {}).items()}
        if not all(map(math.isfinite, levels.values())):
            raise ValueError("its levels are not finite")
        return cls(str(values["source"]), ranges_from_dict(values["ranges"]), work, errors, seen, levels)
