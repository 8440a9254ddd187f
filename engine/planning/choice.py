"""Choose the kernels that run a component on a GPU: all from one prebuilt set, all by Triton, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .. import log
from ..kernels.cards import TRITON
from ..kernels.prebuilt.driver import driver, too_old
from ..kernels.prebuilt.errors import PrebuiltError, WrittenError
from ..kernels.prebuilt.launch import preload, read_ahead
from ..kernels.prebuilt.library import SetError, library
from ..kernels.probe import give_up, works
from ..kernels.targets import Target, projected, ways, without_kernels
from ..network.architecture import Architecture
from ..options import Options
from ..precision.modes import Mode
from ..system.hardware import cores
from .fused_walk import FusedWalk
from .launches import missing, needs, use_id

#: Largest number of threads that compile prebuilt kernels at the same time.
THREADS = 8


class Choices:
    """Choice of kernels for the components of one model on one device.

    It is made once for each component, and again when the chosen kernels turn out to fail."""

    def __init__(self, walk: FusedWalk, device: torch.device, mode: Mode, probe: bool = True) -> None:
        """Prepare the choice; nothing is chosen yet.

        Args:
            walk: dry runs of the model; its options name the kernels that are asked for.
            device: where the model runs.
            mode: precision of convolutions.
            probe: a GPU must have run a first kernel; False: nothing is run, and an untried GPU is trusted.
        """
        self._walk, self._device, self._mode, self._probe = walk, device, mode, probe
        self._made: dict[str, tuple[list[Target], Target]] = {}

    def of(self, half: str) -> Target | None:
        """Return the target that launches the kernels of "encoder" or "decoder".

        It has no kernels where plain torch runs the component, and notes that explain why. None where there is no CUDA
        GPU."""
        if self._device.type != "cuda" or not torch.cuda.is_available():
            return None
        while True:
            able = ways(self._device, self._walk.options.kernels)
            if half in self._made and self._made[half][0] is able:
                return self._made[half][1]
            found = first(self._walk, half, self._mode, able, _cuda())
            if not (found.kernels and self._probe) or works(self._device, found):
                self._made[half] = able, found

    def read_ahead(self, halves: Iterable[str]) -> None:
        """Have the texts of the prebuilt kernels of components read in a thread, where such run here: their first run
        would wait for them (0.2 s and more for SeedVR2's decoder on the host of an H200)."""
        if self._device.type != "cuda" or not torch.cuda.is_available() or not self._walk.options.triton_fusion:
            return
        here = ways(self._device, self._walk.options.kernels)[0]  # the first choice; a component may run another
        if here.set is not None:
            read_ahead(self._index, here.way, (_use(self._walk, half, self._mode) for half in halves))

    @contextmanager
    def loading(self, half: str) -> Iterator[None]:
        """Load the prebuilt kernels of a component while the block runs, in a thread beside it; in a new installation
        the driver compiles them, which takes seconds. All are loaded at the end.

        Raises:
            PrebuiltError, SetError: the kernels cannot be used.
        """
        here = self.of(half)
        if here is None or here.set is None:
            yield
            return
        with ThreadPoolExecutor(1) as pool:
            use = _use(self._walk, half, self._mode)
            loaded = pool.submit(preload, self._index, here.way, use, min(THREADS, cores()))
            yield
        loaded.result()

    @property
    def _index(self) -> int:
        """The device's number, as torch counts."""
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    def lacks(self, half: str) -> str | None:
        """Return why no kernels run a component on this device; None: some do, or there is no CUDA GPU."""
        here = self.of(half)
        return None if here is None or here.kernels else here.notes[0]

    def lacks_any(self, halves: Iterable[str]) -> str | None:
        """Return the reason of the first of these components that has kernels, but none here, or None."""
        own = [half for half in halves if self._walk.why_not(half) is None or self._walk.launches(half)]
        return next((why for half in own if (why := self.lacks(half))), None)

    def give_up(self, half: str, error: Exception) -> bool:
        """Stop launching kernels on this device in the way that raised `error`, or those of the form that did.

        Returns:
            True where others run the component from now on.
        """
        before = self.of(half)
        give_up(self._device, error, TRITON if before is None else before.way)
        after = self.of(half)
        if before is None or after is None:
            return True
        if isinstance(error, WrittenError):
            if after.winograd_off and not before.winograd_off:
                log.warn(f"{half}: direct convolutions from here on, without winograd: {after.winograd_off}")
            return bool(after.winograd_off) and self._walk.options.winograd is True
        if after.way == before.way:
            return False
        log.warn(f"{half}: {after.words} from here on")
        return True


def project(walk: FusedWalk, half: str, name: str, sm: int, mode: Mode) -> Target:
    """Return the target that would run a component on a GPU that need not be in this machine.

    Args:
        walk: dry runs of the model, with its options.
        half: "encoder" or "decoder".
        name: name of the GPU, for messages.
        sm: its compute capability (89 for 8.9).
        mode: precision of convolutions.
    """
    return first(walk, half, mode, projected(name, sm, walk.options.kernels))


def first(walk: FusedWalk, half: str, mode: Mode, able: list[Target], cuda: int | None = None) -> Target:
    """Return the first target of `able` that has all kernels of a component, in PTX that the driver reads; the last one
    is plain torch. cuda: as of `lacks`."""
    reasons: list[str] = []
    *kernels, plain = able
    for here in kernels:
        why = None if here.set is None else lacks(walk, half, mode, here, cuda)
        if why is None:
            return replace(here, passed=tuple(dict.fromkeys((*here.passed, *reasons))))
        reasons.append(why)
    return without_kernels(plain.name, plain.sm, (*reasons, *plain.notes)) if reasons else plain


def lacks(walk: FusedWalk, half: str, mode: Mode, here: Target, cuda: int | None = None) -> str | None:
    """Return why the prebuilt set of `here` cannot run a component, or None.

    The set's index names the models that it was made for; for other widths a dry run finds the launches, which takes
    seconds in a new process.

    Args:
        cuda: newest CUDA that the driver knows (12060 for 12.6), which must read the component's kernels: those in fp8
            need a newer one. None: it is not known, or not this machine's.
    """
    model = _model(walk, half)
    use = _use(walk, half, mode)
    # Notes on other ways change no kernel; without them the cache of `needs` hits.
    wanted = partial(needs, *model, replace(here, passed=()), mode.kind, mode.half_accumulate)
    try:
        sets = library()
        if not sets.covers(here.way, use) and (why := missing(here.way, wanted())):
            return why
        if cuda is None or not any(too_old(cuda, version) for version in sets.versions(here.way)):
            return None
        return too_old(cuda, sets.version(here.way, use, wanted)) or None
    except SetError as error:
        return str(error)


def _use(walk: FusedWalk, half: str, mode: Mode) -> str:
    """Return the name of a component's kernels in a set's index."""
    return use_id(*_model(walk, half), mode.kind, mode.half_accumulate)


def _cuda() -> int | None:
    """Return the newest CUDA that this machine's driver knows; None where it does not say."""
    try:
        return driver().version()
    except PrebuiltError:
        return None


def _model(walk: FusedWalk, half: str) -> tuple[Architecture, Any, str, torch.dtype, Options]:
    # The Winograd form's kernels are in no set, and those of the direct form must be there: where a driver refuses it.
    return walk.architecture, walk.config, half, walk.dtype, replace(walk.options, winograd=False)
