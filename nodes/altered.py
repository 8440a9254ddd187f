"""Detection of changes that other nodes make to VAEs and the layers of their networks, such as convolutions with
circular padding for pictures without seams."""

from __future__ import annotations

from collections.abc import Hashable
from types import FunctionType

from torch import nn

#: Calls of a VAE that nodes replace, and its steps on pictures before and after the network.
_CALLS = ("decode", "decode_tiled", "encode", "encode_tiled", "vae_encode_crop_pixels")
_PICTURES = ("process_input", "process_output")
#: Attributes of a patcher that hold its patches.
_PATCHES = ("patches", "object_patches", "weight_wrapper_patches", "hook_patches", "injections")


def altered(network: nn.Module) -> str | None:
    """Return the name of the first layer that does not compute as its class does, which no weight shows; None: there is
    none."""
    return next((name or "(itself)" for name, layer in network.named_modules() if _is_altered(layer)), None)


def _is_altered(layer: nn.Module) -> bool:
    own = vars(layer)
    if own.get("padding_mode") == "circular" or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    # Methods that replace the class's own. One that was restored is the class's own, bound to the layer.
    kinds = {name: getattr(type(layer), name, None) for name, value in own.items() if callable(value)}
    return any(isinstance(kind, FunctionType) and getattr(own[name], "__func__", None) is not kind
               for name, kind in kinds.items())  # fmt: skip


def replaced(vae: object, kind: type | None = None) -> str | None:
    """Return the first call of a VAE, or step between pictures and its network, that differs from its class; None:
    there is none.

    kind: the class with the right calls (None: the host's own).
    """
    host = type(vae).__mro__[-2]
    for name in _CALLS:
        mine = getattr(type(vae), name, None)
        if name in vars(vae) and getattr(vars(vae)[name], "__func__", None) is not mine:
            return name
        if mine is not getattr(kind or host, name, None):
            return name
    return next((n for n in _PICTURES if getattr(getattr(vae, n, n), "__module__", host.__module__) != host.__module__),
                None)  # fmt: skip


def patched(patcher: object) -> Hashable:
    """Return an identity of the patches that a patcher lays over its model, or that another one has left on it; None:
    there are none. Other patches have another identity."""
    left = getattr(getattr(patcher, "model", None), "current_weight_patches_uuid", None)
    own = getattr(patcher, "patches_uuid", None)
    if any(getattr(patcher, name, None) for name in _PATCHES):
        return own, *sorted(map(str, getattr(patcher, "object_patches", ())))
    return None if left in (None, own) else left
