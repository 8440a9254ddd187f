"""The identity of a model's weights: detects changes, and decides if packed weights are kept on disk."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from pathlib import Path

import torch
from torch import nn

from .. import log
from ..archs import Architecture
from ..calibration.mixed import Mixed
from ..network import codes
from ..network.stamp import Stamp
from ..options import Options
from ..precision.digest import of_network
from ..precision.modes import PRECISIONS
from ..precision.store import Store


class Identity:
    """A model's weights as they were when this was made, and the store that is filed under their values.

    patches: the changes that a host has laid over the weights for a time, in its own terms; None: none. For patched
    weights, and for weights that came from no file (path None), nothing is kept beyond this object's life.
    """

    def __init__(self, model: nn.Module, architecture: Architecture, path: Path | None, patches: Hashable) -> None:
        self._stamp, self._patches = Stamp(model), patches
        native = PRECISIONS[architecture.native]
        kept = path is not None and patches is None
        self.store = Store((lambda: of_network(model, architecture.name, native)) if kept else None)

    def holds(self, model: nn.Module, patches: Hashable, half: str = "") -> bool:
        """Return True if these are still the weights of `model` and the patches over them. half: as in `Stamp`."""
        return patches == self._patches and self._stamp.holds(model, half)


class Following:
    """Base of Core, which sets the attributes declared here: everything that it makes of its weights follows their
    changes."""

    model: nn.Module
    architecture: Architecture
    path: Path | None
    packed_bytes: int
    device: torch.device
    _busy: threading.Lock
    _mixed: Mixed
    _options: Options
    #: The patches that a host has laid over the weights for a time, in its own terms; None: none.
    patches: Hashable = None

    def _identify(self) -> None:
        """Record the present weights as those that everything is made of."""
        self._made_of = Identity(self.model, self.architecture, self.path, self.patches)
        self.store = self._made_of.store

    def _follow(self, half: str = "") -> None:
        """Drop everything made of the weights if they have changed, for whatever reason. Call it with `_busy` held.

        half: the one that runs next, "encoder" or "decoder"; "": either."""
        if not self._made_of.holds(self.model, self.patches, half):
            log.debug("the weights are others now: they are packed anew")
            self.release()
            codes.follow(self.model)
            self._identify()
            self._use(self._options)

    def follow(self) -> None:
        """Call `_follow`, unless a call is running: that call has done so."""
        if self._busy.acquire(blocking=False):
            try:
                self._follow()
            finally:
                self._busy.release()
