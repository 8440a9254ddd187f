"""The identity of a model's weights: detects changes, and decides if packed weights are kept on disk."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import log
from ..network import codes
from ..network.architecture import Architecture
from ..network.stamp import Stamp
from ..options import Options
from ..precision.digest import of_network
from ..precision.modes import PRECISIONS
from ..precision.policies import Policies
from ..system.extension import needed


class Identity:
    """A model's weights as they were when this was made, and the store that is filed under their values.

    patches: the changes that a host has laid over the weights for a time, in its own terms; None: none. For patched
    weights, and for weights that came from no file (path None), nothing is kept beyond this object's life. later: as in
    `Stamp`.
    """

    def __init__(
        self, model: nn.Module, architecture: Architecture, path: Path | None, patches: Hashable, later: bool = False
    ) -> None:
        self._stamp = stamp = Stamp(model, later)
        self._patches, native = patches, PRECISIONS[architecture.native]

        def digest() -> str:
            stamp.holds(model)  # takes the values that the digest is of, if nothing has done so
            return of_network(model, architecture.name, native)

        self._digest = digest if path is not None and patches is None else None

    @functools.cached_property
    def store(self) -> Any:
        """Return the store of what is measured of these weights and packed from them (extras/eight_bit/store.Store)."""
        return needed("operands").Store(self._digest)

    def holds(self, model: nn.Module, patches: Hashable, half: str = "", values: bool = True) -> bool:
        """Return True if these are still the weights of `model` and the patches over them. half, values: as in
        `Stamp`."""
        return patches == self._patches and self._stamp.holds(model, half, values)


class WeightsChanged(Exception):
    """Weights have changed since what runs was made of them; nothing of this run was handed out."""


class Following:
    """Base of Core, which sets the attributes declared here: everything that it makes of its weights follows their
    changes."""

    model: nn.Module
    architecture: Architecture
    path: Path | None
    packed_bytes: int
    device: torch.device
    _busy: threading.Lock
    _mixed: Policies
    _options: Options
    #: Copies of this VAE on other devices, and the latest with another timestep.
    _copies: dict[Any, Any]
    _timed: tuple[float, Any] | None
    #: The patches that a host has laid over the weights for a time, in its own terms; None: none.
    patches: Hashable = None
    #: The component that runs before the values of its weights were compared; "": none.
    _unread: str = ""

    def _identify(self, later: bool = False) -> None:
        """Record the present weights as those that everything is made of. later: nothing has been made of them, and
        their values are recorded by the first call."""
        self._made_of = Identity(self.model, self.architecture, self.path, self.patches, later)
        #: Whose store this VAE uses: a copy's is that of the VAE that was copied.
        self._stored = self._made_of

    @property
    def store(self) -> Any:
        """Return the store of its weights, as `Identity.store`."""
        return self._stored.store

    def _follow(self, half: str = "", values: bool = True) -> None:
        """Drop everything made of the weights if they have changed, for whatever reason. Call it with `_busy` held.

        half: the one that runs next, "encoder" or "decoder"; "": either. values: compare the weights' values now;
        otherwise `confirm` does, which the run must call."""
        self._unread = "" if values else half
        if not self._made_of.holds(self.model, self.patches, half, values):
            self._unread = ""
            log.debug("the weights are others now: they are packed anew")
            self.release()
            codes.follow(self.model)
            self._identify()
            self._use(self._options)

    def confirm(self) -> None:
        """Compare the values that `_follow` left to this call, if it did; raises WeightsChanged.

        A run calls it before it packs weights or hands anything out. Its first chunk is on the GPU by then, which works
        while the CPU reads (2.6 to 4.1 ms for Flux's decoder, beside an H200)."""
        if self._unread and not self._made_of.holds(self.model, self.patches, self._unread):
            self._unread = ""
            raise WeightsChanged
        self._unread = ""  # only now: where the comparison finds no memory, the next attempt makes it

    def follow(self) -> None:
        """Call `_follow`. While a call is running, which does so itself, drop only what that does not use: copies on
        other devices, and with another timestep."""
        if self._busy.acquire(blocking=False):
            try:
                self._follow()
            finally:
                self._busy.release()
        elif not self._made_of.holds(self.model, self.patches):
            self._copies.clear()
            self._timed = None
