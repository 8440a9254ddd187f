"""What was measured of one half of a VAE, and the choice of 8-bit convolutions that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .policy import Policy, Ranges, ranges_as_dict, ranges_from_dict


@dataclass(frozen=True)
class Table:
    """Measurements of an encoder or decoder, by convolution key.

    ranges: of the inputs; work: operations per clip, all convolutions; errors: per kind, the mean square error in
    pixels (-1..1) that a convolution alone makes with 8-bit operands. source: what it was measured on. seen: names of
    the clips that uncalibrated ranges come from; none if they are calibrated.
    """

    source: str
    ranges: Ranges
    work: Mapping[str, int]
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seen: tuple[str, ...] = ()

    def widened(self, other: Table) -> Table:
        """With the ranges of another clip's table as well; never narrower."""
        ranges = {key: found.united(other.ranges[key]) for key, found in self.ranges.items()}
        seen = (*self.seen, *other.seen)
        return replace(self, ranges=ranges, seen=seen, source=f"this file's first {len(seen)} clips")

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
            "seen": list(self.seen),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Table:
        """Raises KeyError, TypeError, ValueError or AttributeError on anything that `as_dict` did not make."""
        errors = {kind: {k: float(e) for k, e in each.items()} for kind, each in values["errors"].items()}
        work = {key: int(n) for key, n in values["work"].items()}
        seen = tuple(map(str, values.get("seen", ())))
        return cls(str(values["source"]), ranges_from_dict(values["ranges"]), work, errors, seen)
