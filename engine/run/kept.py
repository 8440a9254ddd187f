"""Memory on the device that a finished run leaves there so that the next one like it starts at once."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch


class Holder(Protocol):
    """What holds such memory."""

    nbytes: int
    device: torch.device

    def free(self) -> None: ...


class Kept:
    """At most one holder's memory. Whoever needs memory may `release` it; the holder then has none when it is taken up
    again. A holder that nobody else refers to any more is gone with its memory. Of two threads that ask for the same
    memory one gets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: weakref.ref[Holder] | None = None

    def keep(self, holder: Holder) -> None:
        """Leave the memory of `holder` where it is, in place of another one's."""
        self._swap(weakref.ref(holder), None)

    def take(self, holder: Holder | None) -> bool:
        """Whether it is `holder` that was kept: it is in use from now on. Another one is freed."""
        return self._swap(None, holder)

    def release(self) -> None:
        self.take(None)

    def _swap(self, new: weakref.ref[Holder] | None, wanted: Holder | None) -> bool:
        with self._lock:
            kept, self._holder = self._holder and self._holder(), new
        if kept is not None and kept is not wanted:
            kept.free()
        return kept is not None and kept is wanted

    def nbytes(self, device: torch.device) -> int:
        """Bytes that are kept on `device`."""
        holder = self._holder
        kept = holder and holder()
        return kept.nbytes if kept is not None and kept.device == device else 0


#: One for the process: several VAEs share a device.
KEPT = Kept()
