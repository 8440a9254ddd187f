"""Weights that stay in host memory while the network they belong to runs on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

#: A part of a network: a module, or a parameter that belongs to none.
Part = nn.Module | nn.Parameter


class Hosted(nn.Module):
    """Module that stays in host memory when its network moves to a GPU: its weights are gigabytes, and only as many are
    copied to the GPU as a plan has room for."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def here(t: Tensor) -> Tensor:
            like = fn(t.new_empty(0))
            return fn(t) if like.device.type in ("cpu", "meta") else t.to(like.dtype)

        return super()._apply(here, recurse)


def staying(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that stay in host memory; copies of the network for other devices share them."""
    return list({id(p): p for m in network.modules() if isinstance(m, Hosted) for p in m.parameters()}.values())


def moving(*parts: Part, itemsize: int = 0) -> list[int]:
    """Return the bytes of each parameter that moves to a device with these parts; `itemsize` is that of a value, 0: as
    stored."""
    stay = {id(p) for part in parts if isinstance(part, nn.Module) for p in staying(part)}
    return [p.numel() * (itemsize or p.itemsize) for at, p in _weights(parts).items() if at not in stay]


def moving_bytes(*parts: Part, itemsize: int = 0) -> int:
    """Return the total of `moving`."""
    return sum(moving(*parts, itemsize=itemsize))


def lent(device: torch.device, *parts: Part) -> tuple[Part, ...]:
    """Return the parts with their weights on `device`: the parts themselves if they lie there, else copies, which free
    their weights when they are dropped. The weights in host memory are only read, so any number of threads and devices
    may call this at once."""
    weights, device = _weights(parts), torch.empty(0, device=device, dtype=torch.float32).device  # with its number
    if all(p.device == device for p in weights.values()):
        return parts
    # Leave the caller's inference mode: the copies may serve calls outside of it.
    with torch.inference_mode(False), torch.no_grad():
        there = {at: nn.Parameter(p.to(device), requires_grad=False) for at, p in weights.items()}
        return copy.deepcopy(parts, there)


def _weights(parts: Iterable[Part]) -> dict[int, nn.Parameter]:
    """Return the distinct parameters by their id."""
    return {id(p): p for part in parts for p in (part.parameters() if isinstance(part, nn.Module) else (part,))}
