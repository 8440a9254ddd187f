"""What other nodes do to the layers of a network, such as to let convolutions go round for pictures without seams."""

from __future__ import annotations

from torch import nn

#: Methods that nodes put in the place of a layer's own.
_METHODS = ("forward", "_conv_forward")


def altered(network: nn.Module) -> str | None:
    """The first layer that computes otherwise than its kind does, which no weight tells of; None: there is none."""
    return next((name for name, layer in network.named_modules() if _is_altered(layer)), None)


def _is_altered(layer: nn.Module) -> bool:
    own = vars(layer)
    if own.get("padding_mode") == "circular" or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    # One that was put back is the kind's own, bound to the layer.
    return any(getattr(own[m], "__func__", None) is not getattr(type(layer), m) for m in _METHODS if m in own)
