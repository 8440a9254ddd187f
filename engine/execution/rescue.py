"""Choose the VAE with which a call goes on after kernels have failed or values were not finite."""

from __future__ import annotations

import copy
from typing import TypeVar

from .. import log
from ..checkpoints.source import widened
from ..errors import NonFiniteError
from ..kernels.probe import from_kernels
from ..runtime.pressure import out_of_memory
from .calls import Calls
from .guard import SAFER

T = TypeVar("T", bound="Rescue")


class Rescue(Calls):
    """Base of Core, which sets the attributes."""

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
