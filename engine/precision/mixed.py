"""Decides what each half of a VAE computes in 8 bit, and measures what that costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import log
from ..optimize import Options
from ..report import Report
from .bench import Bench
from .measure import from_decibel
from .modes import Mode
from .policy import EXACT, Policy, eligible
from .store import Store
from .table import Table

#: A choice aims this much above the floor: errors of convolutions add up only nearly.
MARGIN_DB = 0.5


@dataclass(frozen=True)
class Quality:
    """What samples of a clip showed. saturated: 8-bit operands at the end of their type."""

    db: float
    saturated: int


class Mixed:
    """The policies of one VAE in one mode.

    Without a floor every eligible convolution is 8 bit wide. With a floor (`options.min_db`) as many as keep it on
    samples of each clip, by measured errors of single convolutions. Ranges and errors come from the store, or are
    measured on the first clip and stored.
    """

    def __init__(self, mode: Mode, model: nn.Module, dtype: torch.dtype, options: Options, store: Store) -> None:
        self.mode = mode
        self._model = model
        self._dtype = dtype
        self._options = options
        self._store = store
        self._policies: dict[str, Policy] = {}
        self._quality: dict[str, Quality] = {}

    def policy(self, half: str) -> Policy:
        """What to plan and pack for. Before `settle` it has no scales, and with a floor it needs most memory."""
        if half in self._policies:
            return self._policies[half]
        if self.mode.kind is None:
            return Policy(half_accumulate=self.mode.half_accumulate)
        if self._options.min_db:
            return EXACT
        return Policy(dict.fromkeys(self._keys(half), self.mode.kind))

    def settle(self, half: str, samples: Callable[[], list[Tensor]]) -> Policy:
        """The policy for a clip, of which `samples` gives some on the device when they are needed."""
        floor = self._options.min_db
        if self.mode.plain or (half in self._policies and not floor):
            return self.policy(half)
        known = self._store.table(half)
        if known is not None and not known.fits(self._keys(half)):
            known = None
        bench = Bench(self._model, half, self._dtype, self._options, samples()) if floor or known is None else None
        if self.mode.kind is None:
            self._policies[half] = self._guarded(half, bench, self.policy(half), lambda _policy, _db: EXACT)
            return self._policies[half]
        if known is None:
            log.info(f"{half}: no calibration of this file, so ranges are measured on this clip and kept")
            known = bench.table("this file's first clip")
            self._store.keep(half, known)
        self._policies[half] = self._floored(half, bench, known) if floor else self._whole(half, known)
        return self._policies[half]

    def _whole(self, half: str, known: Table) -> Policy:
        return Policy(dict.fromkeys(self._keys(half), self.mode.kind), known.ranges)

    def _floored(self, half: str, bench: Bench, known: Table) -> Policy:
        kind, aim = self.mode.kind, from_decibel(self._options.min_db + MARGIN_DB)
        if kind not in known.errors:
            log.info(f"{half}: measuring what each convolution costs in {kind}")
            known = known.with_errors(kind, bench.errors(kind, known.ranges))
            self._store.keep(half, known)
        first = self._policies.get(half) or known.choose(kind, aim)
        return self._guarded(half, bench, first, lambda p, db: known.stricter(p, kind, aim / from_decibel(db)))

    def _guarded(
        self, half: str, bench: Bench, policy: Policy, stricter: Callable[[Policy, float], Policy]
    ) -> Policy:
        """The policy, or the first stricter one that keeps the floor on the samples."""
        floor = self._options.min_db
        while True:
            db, saturation = bench.quality(policy)
            if db >= floor or policy == EXACT or not (policy.kinds or policy.half_accumulate):
                self._quality[half] = Quality(db, saturation.count)
                return policy
            log.info(f"{half}: {db:.1f} dB on samples of the clip, below the floor of {floor:g}: a stricter choice")
            policy = stricter(policy, db)

    def describe(self, half: str) -> str:
        """One line on the settled policy; empty without 8 bit."""
        known, policy = self._store.table(half), self._policies.get(half)
        if known is None or policy is None or self.mode.kind is None:
            return ""
        keys = self._keys(half)
        count = f"{len(policy.kinds)} of {len(keys)} convolutions in {self.mode.kind}"
        share = f"{100 * known.share(policy.kinds):.0f} % of the work"
        return f"{count} ({share}); ranges from {known.source}"

    def note(self, report: Report, half: str) -> None:
        """Put what was measured on samples of the clip into its report."""
        quality = self._quality.get(half)
        if quality is not None:
            report.db = quality.db
            report.events["saturated"] += quality.saturated

    def _keys(self, half: str) -> list[str]:
        return eligible(getattr(self._model, half))
