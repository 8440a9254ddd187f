"""Decides what each half of a VAE computes in 8 bit, and measures what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import log
from ..operands.policy import EXACT, Policy, eligible, finite
from ..options import Options
from ..report import Report
from ..run.devices import empty_device_cache
from .modes import Mode
from .sampling import from_decibel, power
from .store import Store
from .table import Table
from .trials import Trials

#: A choice aims this much above the floor: errors of convolutions add up only nearly.
MARGIN_DB = 0.5
#: Clips that ranges are read from where a file is not calibrated, and clips that are looked at for so many, as some may
#: be far beyond the scale of the others. After those, only how large a clip's values are is looked at.
CLIPS, MOST_CLIPS = 4, 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Quality:
    """What samples of a clip showed. saturated: 8-bit operands at the end of their type."""

    db: float
    saturated: int


class Mixed:
    """The policies of one VAE in one mode.

    Without a floor every eligible convolution is 8 bit wide. With a floor (`options.min_db`) as many as keep it on
    samples of each clip, by measured errors of single convolutions. Ranges and errors come from the store: those of a
    calibration, else the ranges of the first CLIPS clips that the file is used on, each of which widens them, within
    limits (`policy.united`): a run on one of those clips has all of its own range, later ones what is common. A clip
    far beyond the scale of the others (`Table.beyond`) widens nothing, and has its own range for its run. Demo VAE,
    a clip held back, int8 / fp8: calibrated 50.8 / 49.6 dB; only on noise 37.9 / 46.1 dB, on a grey picture 24.4 /
    35.4; widened by the clip itself 49.8 / 49.6 and 51.0 / 49.5. A norm's weight and bias as a guess (4 deviations)
    gives 31.8 / 48.8, and says nothing of the residual streams that resampling reads, so it is not used.
    """

    def __init__(self, mode: Mode, model: nn.Module, dtype: torch.dtype, options: Options, store: Store) -> None:
        self.mode = mode
        self._model = model
        self._dtype = dtype
        self._options = options
        self._store = store
        self._policies: dict[str, Policy] = {}
        #: The table and the clip that a policy without a floor was made for.
        self._fitted: dict[str, tuple[Table, str]] = {}
        self._quality: dict[str, Quality] = {}
        #: With a floor: what is in 8 bit since the last clip.
        self._chosen: dict[str, Mapping[str, str]] = {}

    def policy(self, half: str) -> Policy:
        """What to plan and pack for. Before `settle` it has no scales, and with a floor it needs most memory."""
        if half in self._policies:
            return self._policies[half]
        if self.mode.kind is None:
            return Policy(half_accumulate=self.mode.half_accumulate)
        if self._options.min_db:
            return EXACT
        return Policy(dict.fromkeys(self._keys(half), self.mode.kind))

    def settle(self, half: str, samples: Callable[..., list[Tensor]]) -> Policy:
        """The policy for a clip, of which `samples()` gives some on the device when they are needed, `samples(there)`
        elsewhere."""
        floor = self._options.min_db
        if self.mode.plain or (self.mode.kind is None and not floor):
            return self.policy(half)
        known = self._known(half)
        given: list[Tensor] = []
        if floor or known is None or _open(known):
            given = samples()
        elif known.levels and half == "decoder":  # frames are all of one scale
            given = samples(CPU)  # a look takes no memory on the device that no plan counts
        clip = self._name(given, known)
        if not floor and known is not None and self._fitted.get(half) == (known, clip):
            return self._policies[half]  # ranges of 60,000 channels are not united again for every call
        self._fitted.pop(half, None)
        if floor or known is None or (clip and clip not in known.seen):
            given = given if floor or known is None or _open(known) else samples()
            self._policies[half] = self._measured(half, given, known, clip)
            if given[0].is_cuda:
                empty_device_cache()  # else the run's buffers come on top of what measuring took
        else:
            self._policies[half] = self._whole(half, known.on(clip))
            self._fitted[half] = known, clip
        return self._policies[half]

    @staticmethod
    def _name(samples: list[Tensor], known: Table | None) -> str:
        """Tell clips apart, so that one that is run again changes nothing. Empty for one that need not be told: no more
        clips widen the ranges, and it is not far beyond their scale."""
        if not samples:
            return ""
        total = power(samples)
        usual = known is not None and not known.beyond(math.sqrt(total / sum(s.numel() for s in samples)))
        return "" if usual and not _open(known) else f"{total:.6g}"

    def _known(self, half: str) -> Table | None:
        known = None if self.mode.kind is None else self._store.table(half)
        return known if known is not None and known.fits(self._keys(half)) else None

    def _measured(self, half: str, samples: list[Tensor], known: Table | None, clip: str) -> Policy:
        trials = Trials(self._model, half, self._dtype, self._options, samples)
        if self.mode.kind is None:
            return self._guarded(half, trials, Policy(half_accumulate=True), lambda _policy, _db: EXACT)
        if known is None or (clip and clip not in known.seen):
            new = trials.table("")
            if not finite(new.ranges):
                self._quality.pop(half, None)
                exact = known is None or bool(self._options.min_db)  # no floor can be measured on it
                log.warn(f"{half}: values of this clip overflow in {self._dtype}; its ranges are not kept"
                         + (f", and it runs without {self.mode.kind}" if exact else ""))  # fmt: skip
                return EXACT if exact else self._whole(half, known)
            if known is None or _open(known):
                known = Table.first(clip, new) if known is None else known.widened(clip, new)
                known = self._store.measured(half, known)
                log.info(f"{half}: not calibrated; ranges from {known.source}, and kept")
            else:
                log.info(f"{half}: far beyond the scale of {known.source}; ranges of its own for this run, not kept")
                self._fitted[half] = known, clip
                known = known.with_ranges(new.ranges)
        known = known.on(clip)
        return self._floored(half, trials, known) if self._options.min_db else self._whole(half, known)

    def _whole(self, half: str, known: Table) -> Policy:
        return Policy(dict.fromkeys(self._keys(half), self.mode.kind), known.ranges)

    def _floored(self, half: str, trials: Trials, known: Table) -> Policy:
        kind, aim = self.mode.kind, from_decibel(self._options.min_db + MARGIN_DB)
        if kind not in known.errors:
            log.info(f"{half}: measuring what each convolution costs in {kind}")
            errors = trials.errors(kind, known.ranges)
            if not all(map(math.isfinite, errors.values())):
                self._quality.pop(half, None)
                log.warn(f"{half}: values of this clip overflow; it runs without {kind}, and nothing of it is kept")
                return EXACT
            known = known.with_errors(kind, errors)
            self._store.measured(half, self._store.table(half).with_errors(kind, errors))
        chosen = self._chosen[half] if half in self._chosen else known.choose(kind, aim).kinds
        first = Policy(chosen, known.ranges)
        kept = self._guarded(half, trials, first, lambda p, db: known.stricter(p, kind, aim / from_decibel(db)))
        if kept is not EXACT:
            self._chosen[half] = kept.kinds
        return kept

    def _guarded(
        self, half: str, trials: Trials, policy: Policy, stricter: Callable[[Policy, float], Policy]
    ) -> Policy:
        """The policy, or the first stricter one that keeps the floor on the samples."""
        floor = self._options.min_db
        while True:
            db, saturation = trials.quality(policy)
            if math.isnan(db):  # the exact network's values overflow, too
                self._quality.pop(half, None)
                return EXACT
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
        own = " and the clip's own" if not _open(known) and self._fitted.get(half, ("", ""))[1] else ""
        return f"{count} ({share}); ranges from {known.source}{own}"

    def note(self, report: Report, half: str) -> None:
        """Put what was measured on samples of the clip into its report."""
        quality = self._quality.get(half)
        if quality is not None:
            report.db = quality.db
            report.events["saturated"] = quality.saturated

    def _keys(self, half: str) -> list[str]:
        return eligible(getattr(self._model, half))


def _open(table: Table) -> bool:
    """Whether more clips may widen its ranges."""
    return 0 < len(table.seen) < MOST_CLIPS and len(table.usual) < CLIPS

