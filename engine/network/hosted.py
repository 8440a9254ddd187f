"""Modules whose weights stay in host memory when the network they belong to moves to a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Hosted(nn.Module):
    """Stays in host memory when the network it belongs to moves to a GPU: its weights are gigabytes, of which as many
    are copied there as a plan has room for."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def here(t: Tensor) -> Tensor:
            like = fn(t.new_empty(0))
            return fn(t) if like.device.type in ("cpu", "meta") else t.to(like.dtype)

        return super()._apply(here, recurse)


def staying(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that stay in host memory: copies of the network for other devices share them."""
    return list({id(p): p for m in network.modules() if isinstance(m, Hosted) for p in m.parameters()}.values())


def moving_bytes(network: nn.Module, itemsize: int = 0) -> int:
    """Bytes of the parameters that move to a device with the network. itemsize: of a value, where not as they are."""
    stay = {id(p) for p in staying(network)}
    moving = (p for p in network.parameters() if id(p) not in stay)
    return sum(p.numel() * (itemsize or p.itemsize) for p in moving)
