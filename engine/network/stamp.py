"""Detect changes of a network's weights: packed weights, graphs, copies and files under their digest are valid only as
long as the weights stay the same."""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch
from torch import Tensor, nn


class Stamp:
    """The layers and weights of a network when this was made.

    A check takes 0.05 ms for 200 layers: it compares which objects they are, how often they were written to, and their
    addresses. A network that was moved to another device and back is still the same, so where only the address differs,
    a few values of each tensor decide (1.5 ms). They also decide for tensors made in inference mode, whose writes torch
    does not count.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = weakref.ref(network)
        self._layers = [
            (m._modules, name, weakref.ref(child))
            for m in network.modules() for name, child in m._modules.items() if child is not None
        ]  # fmt: skip
        self._weights = [
            (place, name, weakref.ref(t), None if t.is_inference() else t._version)
            for m in network.modules() for place in (m._parameters, m._buffers)
            for name, t in place.items() if t is not None
        ]  # fmt: skip
        self._absent = [
            (place, name) for m in network.modules() for place in (m._parameters, m._buffers, m._modules)
            for name, one in place.items() if one is None
        ]  # fmt: skip
        self._uncounted = any(version is None for *_, version in self._weights)
        tensors = self._tensors()
        self._addresses, self._values = [t.data_ptr() for t in tensors], _samples(tensors)

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
        look = closely or self._uncounted
        for (place, name, tensor, version), address in zip(self._weights, self._addresses, strict=True):
            t = place.get(name)
            if t is None or t is not tensor() or (version is not None and t._version != version):
                return False
            look |= t.data_ptr() != address
        if look:
            tensors = self._tensors()
            if not torch.equal(_samples(tensors), self._values):
                return False
            self._addresses = [t.data_ptr() for t in tensors]
        return True

    def _tensors(self) -> list[Tensor]:
        return [place[name] for place, name, *_ in self._weights]


@torch.no_grad()
def _samples(tensors: list[Tensor]) -> Tensor:
    """Return a few values of each tensor as float32 [n] on the CPU, whatever its device and layout."""
    parts: list[Tensor] = [torch.empty(0)] * len(tensors)
    there: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, t in enumerate(tensors):
        if not t.is_meta:
            # The first and the middle places along each axis, in one view: slices take five times as long.
            steps = [max(n // 2, 1) * step for n, step in zip(t.shape, t.stride(), strict=True)]
            parts[i] = t.as_strided([min(n, 2) for n in t.shape], steps).reshape(-1)
            there[t.device, t.dtype].append(i)
    for indices in there.values():  # one copy of each kind
        together = torch.cat([parts[i] for i in indices]).cpu().float()
        for i, part in zip(indices, together.split([parts[i].numel() for i in indices]), strict=True):
            parts[i] = part
    return torch.cat(parts).nan_to_num_() if parts else torch.empty(0)
