"""Memory on a device that a finished run leaves in place so that the next one like it starts at once."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch


class Holder(Protocol):
    """Object that holds such memory."""

    nbytes: int
    device: torch.device

    def free(self) -> None: ...


class Kept:
    """At most one holder's memory on each device.

    Any code that needs memory may `release` it; the holder then has none when it is taken up again. A holder without
    other references is gone with its memory. Of two threads that take the same memory one gets it, and neither returns
    before memory that it did not get is free, because its holder may use the same ExecutionContext again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders: dict[torch.device, weakref.ref[Holder]] = {}

    def keep(self, holder: Holder) -> None:
        """Leave the memory of `holder` in place, instead of another one's on its device."""
        self._swap(holder.device, weakref.ref(holder), None)

    def take(self, device: torch.device, holder: Holder | None) -> bool:
        """Take the kept memory of a device into use. Returns whether it is that of `holder`; another one's is freed."""
        return self._swap(device, None, holder)

    def release(self, device: torch.device | None = None) -> None:
        """Free the memory kept on a device; None: on all of them."""
        for each in list(self._holders) if device is None else [device]:
            self._swap(each, None, None)

    def _swap(self, device: torch.device, new: weakref.ref[Holder] | None, wanted: Holder | None) -> bool:
        with self._lock:
            ref = self._holders.pop(device, None)
            if new is not None:
                self._holders[device] = new
            kept = ref and ref()
            if kept is not None and kept is not wanted:
                kept.free()
        return kept is not None and kept is wanted

    def nbytes(self, device: torch.device) -> int:
        """Return the bytes that are kept on `device`."""
        ref = self._holders.get(device)
        kept = ref and ref()
        return 0 if kept is None else kept.nbytes


#: One for the process: several VAEs share a device.
KEPT = Kept()
