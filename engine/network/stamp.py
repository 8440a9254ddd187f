"""Detect changes of a network's weights: packed weights, graphs, copies and files under their digest are valid only as
long as the weights stay the same."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict

import torch
from torch import Tensor, nn

#: Values of each tensor that are compared.
SAMPLES = 8


class Stamp:
    """The layers and weights of a network when this was made.

    A check compares which objects they are, how often they were written to, and their addresses (Mage-VAE's 728
    weights: 0.2 ms). A network that was moved to another device and back is still the same, so where only the address
    differs, a few values of each tensor decide (1.5 ms more). They also decide for tensors made in inference mode,
    whose writes torch does not count: those of a VAE that a host has loaded or moved, in every call.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = weakref.ref(network)
        self._layers = [
            (m._modules, name, weakref.ref(child))
            for m in network.modules() for name, child in m._modules.items() if child is not None
        ]  # fmt: skip
        self._weights = [
            (place, name, weakref.ref(t))
            for m in network.modules() for place in (m._parameters, m._buffers)
            for name, t in place.items() if t is not None
        ]  # fmt: skip
        self._absent = [
            (place, name) for m in network.modules() for place in (m._parameters, m._buffers, m._modules)
            for name, one in place.items() if one is None
        ]  # fmt: skip
        tensors = self._tensors()
        self._marks, self._values = _marks(tensors), _samples(tensors)

    def holds(self, network: nn.Module, closely: bool = False) -> bool:
        """Check whether `network` is the one that this was made of, with the same layers and weights.

        closely: compare a few values of each tensor in any case, which also finds what torch does not count, such as
        `weight.data.mul_(2)`.
        """
        if self._network() is not network:
            return False
        if any((layer := place.get(name)) is None or layer is not known() for place, name, known in self._layers):
            return False
        if any(place.get(name) is not None for place, name in self._absent):
            return False
        if any((t := place.get(name)) is None or t is not known() for place, name, known in self._weights):
            return False
        tensors = self._tensors()
        marks = _marks(tensors)
        for (writes, _), (before, _) in zip(marks, self._marks, strict=True):
            if writes != before and None not in (writes, before):
                return False
        if closely or marks != self._marks or any(writes is None for writes, _ in marks):
            if not torch.equal(_samples(tensors), self._values):
                return False
            self._marks = marks  # a tensor that was moved may count its writes now, or no longer
        return True

    def _tensors(self) -> list[Tensor]:
        return [place[name] for place, name, _ in self._weights]


def _marks(tensors: list[Tensor]) -> list[tuple[int | None, int]]:
    """Return how often each tensor was written to, None where torch does not count that, and its address."""
    return [(None if t.is_inference() else t._version, t.data_ptr()) for t in tensors]


@torch.no_grad()
def _samples(tensors: list[Tensor]) -> Tensor:
    """Return values of each tensor, zeros of one without any, as float32 [tensors, SAMPLES] on the CPU, whatever its
    device and layout."""
    there: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, t in enumerate(tensors):
        if not t.is_meta and t.numel():
            there[t.device, t.dtype].append(i)
    found = torch.zeros(len(tensors), SAMPLES)
    for indices in there.values():  # one copy of each kind, one view of each tensor: more take several times as long
        lines = [(t := tensors[i]).as_strided((SAMPLES,), (_diagonal(t.shape, t.stride()),)) for i in indices]
        found[indices] = torch.cat(lines).cpu().float().view(-1, SAMPLES)
    return found.nan_to_num_()


@functools.lru_cache(4096)
def _diagonal(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the distance in memory of SAMPLES places along the diagonal of a tensor; an axis with fewer places than
    that stays at its first."""
    return sum(n // SAMPLES * stride for n, stride in zip(shape, strides, strict=True))
