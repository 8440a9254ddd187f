"""State of a VAE's calls: which call holds its packed weights and plans, its last report, torch's settings, and the VAE
that a call goes on with after kernels have failed or values were not finite."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from .. import log
from ..checkpoints.source import widened
from ..errors import NonFiniteError
from ..kernels.probe import from_kernels
from ..kernels.targets import using
from ..planning.make import decided
from ..report import Report
from ..runtime.pressure import out_of_memory
from ..runtime.scope import scoped_math
from .guard import SAFER
from .identity import Following

T = TypeVar("T", bound="Calls")


class Calls(Following):
    """Base of Core, which sets the attributes that are not declared here."""

    def asks(self) -> Callable[[], None] | None:
        """Return `on_pressure`; in the threads of several devices, the callback that goes by way of the caller's
        thread."""
        return getattr(self._own, "asks", self.on_pressure)

    def _separate(self) -> None:
        """Give this object its own copy of everything that calls write to."""
        #: Copies of this VAE on other devices, by device and number on it.
        self._copies: dict[tuple[torch.device, int], Calls] = {}
        #: The number of runs that share this machine's memory, each on its device.
        self.sharing = 1
        #: Held by the call that uses the packed weights, plans and graphs.
        self._busy = threading.Lock()
        self._own = threading.local()
        #: The latest VAE that `at` made, with its timestep.
        self._timed: tuple[float, Calls] | None = None
        self._latest: Report | None = None

    @property
    def last_report(self) -> Report | None:
        """Return the report of this thread's latest decode or encode, or where it has had none, of any thread's. It is
        filled from the start of a run on; None before the first."""
        return getattr(self._own, "report", self._latest)

    @contextmanager
    def _claimed(self: T, half: str, confirms: bool = False) -> Iterator[T]:
        """Yield this VAE for one call of "encoder" or "decoder". Where another call has it, in any thread, yield one
        with the same weights that packs and plans for itself: calls share nothing that they write to, and none waits
        for another. confirms: the caller calls `confirm`, and may begin with what is packed before that."""
        if self._busy.acquire(blocking=False):
            try:
                self._follow(half, values=not (confirms and self._fused.packed_bytes(half)))
                refused = decided(self._options, self.device) != self._decided
                if refused or (self._mixed.mode.kind and self._no_8_bit() is not None):
                    self._use(self._options)  # another VAE has found that kernels fail: no 8 bit without them
                yield self
            finally:
                self._busy.release()
        else:
            other = copy.copy(self)
            other._unread = ""
            if not self._made_of.holds(self.model, self.patches, half):
                other._identify()
            other._use(self._options)
            yield other

    @contextmanager
    def _scope(self, half: str = "") -> Iterator[None]:
        """Apply the options to torch's settings, and choose a component's kernels, for the duration of its run."""
        o = self._options
        math = scoped_math(self.device, tf32=o.tf32, cudnn_benchmark=o.cudnn_benchmark,
                           flash_attention=o.flash_attention)  # fmt: skip
        with math, using(self.kernels(half) if half else None):
            yield

    def _begin(self, operation: str, clip: tuple[int, int, int, int]) -> Report:
        """Start the report of a run; clip: batch, frames, height and width in pixels."""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return self._tell(Report(operation, clip, self.arch, self.precision, f"{self.device}{name}"))

    def _tell(self, report: Report) -> Report:
        """Make `report` the last one."""
        self._own.report = self._latest = report
        return report

    # -- after trouble -----------------------------------------------------------------------------------------------

    def _without_kernels(self, half: str, error: Exception) -> bool:
        """Switch the failed kernels off on this device, for this and all later calls, and return True, if `error` is
        theirs and other kernels or plain torch can run the component without them."""
        launched = self.fused() is not None or self.launches(half)
        if not launched or not from_kernels(error) or out_of_memory(error):
            return False
        if not self._choices.give_up(half, error) or (self.kernels(half) is None and self.fused() is not None):
            return False
        self._release_here()
        self._use(self._options)
        return True

    def _safer(self: T, where: str) -> T:
        """Return this VAE without approximations or, if it has none, in the type of the next wider range, after a run
        in which `where` was not finite. Raises NonFiniteError where there is none."""
        exact = self._mixed.mode.plain
        if exact and self.dtype not in SAFER:
            raise NonFiniteError(f"{where} came out as NaN or Inf in {self.precision}: weights or latent are damaged")
        dtype, name = SAFER[self.dtype] if exact else (self.dtype, self._float)
        log.warn(f"{where} came out as NaN or Inf in {self.precision}; going on from there in {name}")
        self._release_here()
        other = copy.copy(self)
        other.asked, other._float, other.dtype = name, name, dtype
        if exact:
            other.model = widened(self._loaded, self.source, dtype)
            other._identify()
        other._use(self._options.switched(off=["fp8"]))
        return other
