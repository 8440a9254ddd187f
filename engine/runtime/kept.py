"""Memory on the device that a finished run leaves there so that the next one like it starts at once."""

from __future__ import annotations

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
    again. A holder that nobody else refers to any more is gone with its memory."""

    def __init__(self) -> None:
        self._holder: weakref.ref[Holder] | None = None

    def keep(self, holder: Holder) -> None:
        """Leave the memory of `holder` where it is, in place of another one's."""
        self.take(None)
        self._holder = weakref.ref(holder)

    def take(self, holder: Holder | None) -> bool:
        """Whether it is `holder` that was kept: it is in use from now on. Another one is freed."""
        kept = self._holder and self._holder()
        self._holder = None
        if kept is not None and kept is not holder:
            kept.free()
        return kept is not None and kept is holder

    def release(self) -> None:
        self.take(None)

    def nbytes(self, device: torch.device) -> int:
        """Bytes that are kept on `device`."""
        kept = self._holder and self._holder()
        return kept.nbytes if kept is not None and kept.device == device else 0


#: One for the process: several VAEs share a device.
KEPT = Kept()
