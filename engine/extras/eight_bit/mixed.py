"""Choose the convolutions of each component that run in 8 bit, and measure the loss in dB."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import log
from ...options import Options
from ...precision.modes import Mode
from ...precision.policies import Samples, T, unsettled
from ...precision.policy import EXACT, Policy, eligible, finite
from ...report import Report
from ...system.devices import empty_device_cache
from .prepared import load, recipe, save
from .sampling import Trials, from_decibel, latent_samples, power, video_samples
from .store import Store
from .table import Table

#: A choice aims this much above the floor, because errors of convolutions add up only approximately.
MARGIN_DB = 0.5
#: Clips that ranges are read from where a file is not calibrated, and most clips that are examined to find so many, as
#: some may be far beyond the scale of the others. Of later clips only the level (root mean square) is examined.
CLIPS, MOST_CLIPS = 4, 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Quality:
    """Quality measured on samples of a clip. db: PSNR against the exact policy. saturated: number of 8-bit operands at
    the limits of their type."""

    db: float
    saturated: int


class Mixed:
    """Policies of one VAE in one mode.

    Without a floor every eligible convolution runs in 8 bit. With a floor (`options.min_db`) as many do as keep it on
    samples of each clip, by measured errors of single convolutions. Ranges and errors come from the store: those of a
    calibration, else the ranges of the first CLIPS clips that the file is used on. Each of these clips widens the
    ranges, within limits (`policy.united`): a run on one of them uses all of its own range, later runs the united one.
    A clip far beyond the scale of the others (`Table.beyond`) widens nothing, and its run uses its own range. Demo VAE,
    a clip not used for calibration, int8 / fp8: calibrated 50.8 / 49.6 dB; calibrated only on noise 37.9 / 46.1 dB, on
    a grey picture 24.4 / 35.4; these two widened by the clip itself 49.8 / 49.6 and 51.0 / 49.5. A guess from a norm's
    weight and bias (4 deviations) gives 31.8 / 48.8, and no range for the residual streams that resampling reads, so it
    is not used.
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
        #: With a floor: convolutions in 8 bit since the last clip, with their types.
        self._chosen: dict[str, Mapping[str, str]] = {}

    def policy(self, half: str) -> Policy:
        """Return the policy to plan and pack for."""
        if half in self._policies:
            return self._policies[half]
        return unsettled(self.mode, self._options.min_db, getattr(self._model, half))

    def settle(self, half: str, samples: Samples) -> Policy:
        """Return the policy for a clip, and measure on samples of it where that is necessary."""
        floor = self._options.min_db
        if self.mode.plain or (self.mode.kind is None and not floor):
            return self.policy(half)
        known, cut = self._known(half), latent_samples if half == "decoder" else video_samples
        given: list[Tensor] = []
        if floor or known is None or _open(known):
            given = samples(cut)
        elif known.levels and half == "decoder":  # an encoder's frames always have the same scale
            given = samples(cut, CPU)  # plans do not count memory for this on the device
        clip = self._name(given, known)
        if not floor and known is not None and self._fitted.get(half) == (known, clip):
            return self._policies[half]  # do not unite ranges of 60,000 channels again for every call
        self._fitted.pop(half, None)
        if floor or known is None or (clip and clip not in known.seen):
            given = given if floor or known is None or _open(known) else samples(cut)
            self._policies[half] = self._measured(half, given, known, clip)
            if given[0].is_cuda:
                empty_device_cache()  # or the run's buffers come on top of the memory that measuring took
        else:
            self._policies[half] = self._whole(half, known.on(clip))
            self._fitted[half] = known, clip
        return self._policies[half]

    @staticmethod
    def _name(samples: list[Tensor], known: Table | None) -> str:
        """Return a name for a clip, so that the same clip changes nothing when it is run again.

        Empty where no name is needed: no more clips widen the ranges, and this one is not far beyond their scale."""
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
                exact = known is None or bool(self._options.min_db)  # a floor cannot be measured on this clip
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
        """Return the policy, or the first stricter one that keeps the floor on the samples."""
        floor = self._options.min_db
        while True:
            db, saturation = trials.quality(policy)
            if math.isnan(db):  # values of the exact network overflow, too
                self._quality.pop(half, None)
                return EXACT
            if db >= floor or policy == EXACT or not (policy.kinds or policy.half_accumulate):
                self._quality[half] = Quality(db, saturation.count)
                return policy
            log.info(f"{half}: {db:.1f} dB on samples of the clip, below the floor of {floor:g}: a stricter choice")
            policy = stricter(policy, db)

    def packed(
        self, make: Callable[[], T], plan: Callable[[], T], made_of: tuple[Any, ...], half: str, device: torch.device
    ) -> T:
        """Return the packed network, from the store where it has been packed before; 16-bit weights cost less to pack
        than to read. Args: those of `Policies.packed`."""
        place = self._store.prepared(half) if made_of[0].policy.kinds else None
        if place is None:
            return make()
        made_from = recipe(*made_of)
        network = load(plan(), place, made_from, device)
        if network is None:
            network = make()
            if self._store.holds:
                save(network, place, made_from)
        return network

    def describe(self, half: str, report: Report) -> None:
        """Write one line about the settled policy, and the quality measured on samples of the clip, into its report."""
        report.operands = self._words(half)
        quality = self._quality.get(half)
        if quality is not None:
            report.db = quality.db
            report.events["saturated"] = quality.saturated

    def _words(self, half: str) -> str:
        policy = self._policies.get(half)
        if policy is None or self.mode.kind is None:
            return ""  # without a look at the store's files, which a picture's decode would notice
        known = self._store.table(half)
        if known is None:
            return ""
        keys = self._keys(half)
        count = f"{len(policy.kinds)} of {len(keys)} convolutions in {self.mode.kind}"
        share = f"{100 * known.share(policy.kinds):.0f} % of the work"
        own = " and the clip's own" if not _open(known) and self._fitted.get(half, ("", ""))[1] else ""
        return f"{count} ({share}); ranges from {known.source}{own}"

    def _keys(self, half: str) -> list[str]:
        return eligible(getattr(self._model, half))


def _open(table: Table) -> bool:
    """Check if more clips may widen the table's ranges."""
    return 0 < len(table.seen) < MOST_CLIPS and len(table.usual) < CLIPS

