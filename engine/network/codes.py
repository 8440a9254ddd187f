"""8-bit codes of linear layers as files hold them, for products that multiply the codes themselves."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from ..kernels.tokens import hadamard

#: Rows of a weight that are compared at once.
ROWS = 256


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
        """Keep the codes with the layer; they count as long as its weight stays the same."""
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


    def stand_for(self, weight: Tensor) -> bool:
        """Check whether a weight [N, K] holds the values of these codes, in a type that a file's are rounded to."""
        if weight.shape != self.values.shape:
            return False
        parts = (self.values, self.scales, weight)
        return all(_equal(*part, self.group) for part in zip(*(t.split(ROWS) for t in parts), strict=True))


def there(network: nn.Module) -> bool:
    """Check whether any layer has codes."""
    return any(getattr(layer, "codes", None) is not None for layer in network.modules())


def forget(network: nn.Module) -> None:
    """Drop the codes of all layers."""
    for layer in network.modules():
        if getattr(layer, "codes", None) is not None:
            layer.codes = None


def follow(network: nn.Module) -> None:
    """Use each layer's codes as long as its weight has their values: a host lays patches over weights, takes them away
    again, and puts other tensors with the same values in their place."""
    for layer in network.modules():
        if (codes := getattr(layer, "codes", None)) is not None:
            mine = Codes(codes.values, codes.scales, codes.group)  # copies of the network have the old one
            if codes.stand_for(layer.weight):
                mine.attach(layer)
            else:
                layer.codes = mine


@torch.no_grad()
def _equal(values: Tensor, scales: Tensor, weight: Tensor, group: int) -> bool:
    there = values.to(weight.device).float()
    if group:
        there = (there.view(-1, group) @ hadamard(group).to(there.device)).view(there.shape)
    there = there * scales.to(weight.device)[:, None]
    return any(torch.equal(there.to(kind).to(weight.dtype), weight)
               for kind in (weight.dtype, torch.float32, torch.float16, torch.bfloat16))  # fmt: skip


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version
