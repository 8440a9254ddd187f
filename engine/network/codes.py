"""8-bit codes of linear layers as files hold them, for products that multiply the codes themselves."""

from __future__ import annotations

import weakref

from torch import Tensor, nn


class Codes:
    """A weight's int8 codes, which its float values were made of.

    Args:
        values: int8 [N, K].
        scales: float32 [N]; a row's codes times its scale are its rotated values.
        group: number of columns that were rotated together, as those of the layer's inputs then have to be; 0: none
            were.
    """

    def __init__(self, values: Tensor, scales: Tensor, group: int) -> None:
        self.values, self.scales, self.group = values, scales, group
        self._of: tuple[weakref.ref, int | None] | None = None

    def __deepcopy__(self, memo: dict) -> Codes:
        """Return the same object: copies of a network for other devices share its weights in host memory."""
        return self

    def attach(self, linear: nn.Linear) -> None:
        """Keep the codes with the layer, as long as its weight stays the same."""
        self._of = weakref.ref(linear.weight), _version(linear.weight)
        linear.codes = self

    @staticmethod
    def of(linear: nn.Linear) -> Codes | None:
        """Return the codes of a layer; None if it has none, or its weight has been changed since."""
        codes = getattr(linear, "codes", None)
        if codes is None or codes._of is None:
            return None
        weight, version = codes._of
        return codes if weight() is linear.weight and version == _version(linear.weight) else None


def forget(network: nn.Module) -> None:
    """Drop the codes of all layers: some of the weights are others now."""
    for layer in network.modules():
        if getattr(layer, "codes", None) is not None:
            layer.codes = None


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version
