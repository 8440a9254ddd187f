"""Networks of VAEs as other nodes see and change them. No ComfyUI."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor, nn

#: Calls of a VAE that nodes replace, and its steps on pictures before and after the network.
_CALLS = ("decode", "decode_tiled", "encode", "encode_tiled", "vae_encode_crop_pixels")
_PICTURES = ("process_input", "process_output")
#: Attributes of a patcher that hold its patches.
_PATCHES = ("patches", "object_patches", "weight_wrapper_patches", "hook_patches", "injections")


def altered(network: nn.Module) -> str | None:
    """Return the name of the first layer that does not compute as its class does; None if there is none."""
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

    kind: the class with the right calls (None: the lowest one of the VAE, which is the host's own, unless a pack gives
    an object of its own for a VAE).
    """
    host = (kind or type(vae)).__mro__[-2]
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


def file_of(vae: object) -> Path | None:
    """Return the file that the host's own loader read a VAE from; None where it does not say (before 0.33)."""
    made = getattr(getattr(vae, "patcher", None), "cached_patcher_init", None)
    from_file = made and made[0].__name__ in ("load_vae_patcher", "load_checkpoint_vae_patcher")
    return Path(made[1][0]) if from_file else None


#: Attribute that nodes set on a host's network -> the decode option that it stands for.
SETTINGS = {"decode_timestep": "timestep", "decode_noise_scale": "noise"}


class Direct:
    """A network with all its attributes, whose encoder and decoder the engine runs under the settings of `vae`."""

    def __init__(self, network: nn.Module, vae: Any) -> None:
        """vae: a weak reference to the engine's VAE, whose `decoder` has the options that were set on its network;
        otherwise it and everything it holds would wait for the garbage collector."""
        self._network, self._vae = network, vae

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS and SETTINGS[name] in self._vae.decoder:
            return self._vae.decoder[SETTINGS[name]]
        return getattr(object.__getattribute__(self, "_network"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. `SETTINGS` count for this VAE alone, although others may share its weights."""
        if name in SETTINGS:
            self._vae.decoder = {**self._vae.decoder, SETTINGS[name]: float(value)}
        else:
            super().__setattr__(name, value)

    def decode(self, z: Tensor, output_buffer: Tensor | None = None, **_: object) -> Tensor:
        """Decode latents [B, C, T, h, w] (of pictures [B, C, h, w]) to [B, 3, F, H, W] (or [B, 3, H, W]) in -1..1, into
        `output_buffer` if there is one. What else newer hosts tell their networks (a tile, a device) is the engine's
        own choice."""
        frames = self._vae.decode(z).mul(2).sub(1).movedim(-1, 1)
        return frames if output_buffer is None else output_buffer.copy_(frames)

    def encode(self, x: Tensor, **_: object) -> Tensor:
        """Encode [B, 3, F, H, W] (or [B, 3, H, W]) in -1..1 to latents, as `decode` takes them."""
        return self._vae.encode(x.movedim(1, -1).add(1).div(2))
