"""Memory on a device that a finished run leaves there so that the next one like it starts at once."""

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
    """At most one holder's memory on each device. Whoever needs memory may `release` it; the holder then has none when
    it is taken up again. A holder that nobody else refers to any more is gone with its memory. Of two threads that ask
    for the same memory one gets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[torch.device, weakref.ref[Holder]] = {}

    def keep(self, holder: Holder) -> None:
        """Leave the memory of `holder` where it is, in place of another one's."""
        with self._lock:
            before = self._pop(holder.device)
            self._holders[holder.device] = weakref.ref(holder)
        if before is not None and before is not holder:
            before.free()

    def take(self, holder: Holder | None) -> bool:
        """Whether it is `holder` that was kept: it is in use from now on. Another one on its device, or without a
        holder all of them, are freed."""
        with self._lock:
            devices = list(self._holders) if holder is None else [holder.device]
            kept = [k for k in map(self._pop, devices) if k is not None]
        for other in kept:
            if other is not holder:
                other.free()
        return holder is not None and any(k is holder for k in kept)

    def release(self) -> None:
        self.take(None)

    def _pop(self, device: torch.device) -> Holder | None:
        held = self._holders.pop(device, None)
        return held and held()

    def nbytes(self, device: torch.device) -> int:
        """Bytes that are kept on `device`."""
        held = self._holders.get(device)
        kept = held and held()
        return kept.nbytes if kept is not None else 0


#: One for the process: several VAEs share a device.
KEPT = Kept()
