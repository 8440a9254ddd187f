"""The weights that packed ones, plans and graphs are made of, and what is kept of them on disk."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from pathlib import Path

from torch import nn

from . import log
from .archs import Architecture
from .network.stamp import Stamp
from .options import Options
from .precision.digest import of_network
from .precision.mixed import Mixed
from .precision.modes import PRECISIONS
from .precision.store import Store


class Identity:
    """What a model's weights were when this was made, and the store that is filed under what they hold.

    patches: what a host has put over the weights for a time, in whatever terms; None: nothing. Of patched weights, and
    of those that came from no file (path None), nothing is kept beyond this object's life.
    """

    def __init__(self, model: nn.Module, architecture: Architecture, path: Path | None, patches: Hashable) -> None:
        self._stamp, self._patches = Stamp(model), patches
        native = PRECISIONS[architecture.native]
        kept = path is not None and patches is None
        self.store = Store((lambda: of_network(model, architecture.name, native)) if kept else None)

    def holds(self, model: nn.Module, patches: Hashable, closely: bool = False) -> bool:
        """Check whether these are still the weights of `model` and the patches over them. closely: as in `Stamp`."""
        return patches == self._patches and self._stamp.holds(model, closely)


class Following:
    """For a Core, which sets what is declared here: all that it makes of its weights follows them."""

    model: nn.Module
    architecture: Architecture
    path: Path | None
    packed_bytes: int
    _busy: threading.Lock
    _mixed: Mixed
    _options: Options
    #: What a host has put over the weights for a time, as they are now, in whatever terms; None: nothing.
    patches: Hashable = None

    def _identify(self) -> None:
        """Take the weights as they are now for those that all is made of."""
        self._made_of = Identity(self.model, self.architecture, self.path, self.patches)
        self.store = self._made_of.store

    def _follow(self) -> None:
        """Drop what was made of the weights if they are others now, whoever changed them. For who holds `_busy`."""
        closely = self._mixed.mode.kind is not None and not self.packed_bytes  # read from disk or written there next
        if not self._made_of.holds(self.model, self.patches, closely):
            log.debug("the weights are others now: they are packed anew")
            self.release()
            self._identify()
            self._use(self._options)

    def follow(self) -> None:
        """`_follow`, unless a call is under way: that has done so."""
        if self._busy.acquire(blocking=False):
            try:
                self._follow()
            finally:
                self._busy.release()
