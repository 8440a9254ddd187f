"""The weights that packed ones, plans and graphs are made of, and what is kept of them on disk."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from torch import nn

from .archs import Architecture
from .network.stamp import Stamp
from .precision.digest import of_network
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
