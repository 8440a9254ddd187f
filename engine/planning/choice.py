"""Choose which kernels run a half of a model on a GPU: all of them from one prebuilt set, or by Triton, or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from .. import log
from ..archs import Architecture
from ..hardware import cores
from ..kernels.cards import TRITON
from ..kernels.prebuilt.driver import driver
from ..kernels.prebuilt.library import SetError, library
from ..kernels.probe import give_up, works
from ..kernels.targets import Target, projected, ways, without_kernels
from ..options import Options
from ..precision.modes import Mode
from .fused_walk import FusedWalk
from .launches import missing, needs, use_id

#: Contexts that compile at the same time.
HELPERS = 4


class Choices:
    """What runs the halves of one model on one device. Chosen once for each half, and again when what was chosen turns
    out to fail."""

    def __init__(self, walk: FusedWalk, device: torch.device, mode: Mode, probe: bool = True) -> None:
        """walk: of the model under its options, which say what is asked for. mode: what convolutions compute in. probe:
        a GPU must have run a first kernel; without it nothing is run, and a GPU that has not been tried is trusted."""
        self._walk, self._device, self._mode, self._probe = walk, device, mode, probe
        self._made: dict[str, tuple[list[Target], Target]] = {}

    def of(self, half: str) -> Target | None:
        """Return what launches the kernels of "encoder" or "decoder"; without kernels where plain torch runs the half,
        which its notes explain. None where there is no CUDA GPU."""
        if self._device.type != "cuda" or not torch.cuda.is_available():
            return None
        while True:
            able = ways(self._device, self._walk.options.kernels)
            if half in self._made and self._made[half][0] is able:
                return self._made[half][1]
            found = first(self._walk, half, self._mode, able)
            if not (found.kernels and self._probe) or works(self._device, found):
                self._made[half] = able, found

    def warm(self, half: str) -> None:
        """Have the prebuilt kernels of a half compiled before it first runs, which takes seconds in a new installation.
        Raises PrebuiltError or SetError."""
        here = self.of(half)
        if here is None or here.set is None:
            return
        use = use_id(*_model(self._walk, half), self._mode.kind, self._mode.half_accumulate)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        driver().warm(index, library().texts(here.way, use), min(HELPERS, cores()))

    def lacks(self, half: str) -> str | None:
        """Return why no kernels run a half on this device; None: some do, or there are none for any half."""
        here = self.of(half)
        return None if here is None or here.kernels else here.notes[0]

    def lacks_any(self, halves: Iterable[str]) -> str | None:
        """Return the same of the first of these halves that lacks them, though kernels for it exist."""
        return next((why for half in halves if self._walk.why_not(half) is None and (why := self.lacks(half))), None)

    def give_up(self, half: str, error: Exception) -> bool:
        """Launch nothing more on this device the way that raised `error`. Returns whether something else runs the half
        now."""
        before = self.of(half)
        give_up(self._device, error, TRITON if before is None else before.way)
        after = self.of(half)
        if before is None or after is None:
            return True
        if after.way == before.way:
            return False
        log.warn(f"{half}: {after.words} from here on")
        return True


def project(walk: FusedWalk, half: str, name: str, sm: int, mode: Mode) -> Target:
    """Return what would run a half on a GPU that need not be here.

    Args:
        walk, half, mode: as for `Choices`.
        name: the GPU's, for words.
        sm: its compute capability (89 for 8.9).
    """
    return first(walk, half, mode, projected(name, sm, walk.options.kernels))


def first(walk: FusedWalk, half: str, mode: Mode, able: list[Target]) -> Target:
    """Return the first of `able` that has all kernels of a half; the last one is plain torch."""
    reasons: list[str] = []
    *kernels, plain = able
    for here in kernels:
        why = None if here.set is None else lacks(walk, half, mode, here)
        if why is None:
            return replace(here, passed=tuple(dict.fromkeys((*here.passed, *reasons))))
        reasons.append(why)
    return without_kernels(plain.name, plain.sm, (*reasons, *plain.notes)) if reasons else plain


def lacks(walk: FusedWalk, half: str, mode: Mode, here: Target) -> str | None:
    """Return why the prebuilt set of `here` cannot run a half, or None. What the set was made for is in its index; for
    other widths the launches are walked, which takes seconds in a new process."""
    model = _model(walk, half)
    try:
        if library().covers(here.way, use_id(*model, mode.kind, mode.half_accumulate)):
            return None
        # What is said of other ways changes no kernel.
        return missing(here.way, needs(*model, replace(here, passed=()), mode.kind, mode.half_accumulate))
    except SetError as error:
        return str(error)


def _model(walk: FusedWalk, half: str) -> tuple[Architecture, Any, str, torch.dtype, Options]:
    return walk.architecture, walk.config, half, walk.dtype, walk.options
