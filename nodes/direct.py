"""A VAE's network as nodes of other packs call it behind the VAE's back, by the names that the host's networks have."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

#: What nodes set on a host's network -> the option of a decode that it is.
SETTINGS = {"decode_timestep": "timestep", "decode_noise_scale": "noise"}


class _VAE(Protocol):
    #: Options of its decodes that were set on its network.
    decoder: dict[str, float]

    def decode(self, samples_in: Tensor) -> Tensor: ...
    def encode(self, pixel_samples: Tensor) -> Tensor: ...


class Direct:
    """All that the network is, with its two halves run by the engine under the wishes of `vae`."""

    def __init__(self, network: nn.Module, vae: _VAE) -> None:
        """vae: a weak reference, else it and what it holds would wait for the garbage collector."""
        self._network, self._vae = network, vae

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS and SETTINGS[name] in self._vae.decoder:
            return self._vae.decoder[SETTINGS[name]]
        return getattr(object.__getattribute__(self, "_network"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Unlike on a host's network, what is set counts for this VAE alone, whoever shares its weights."""
        if name in SETTINGS:
            self._vae.decoder = {**self._vae.decoder, SETTINGS[name]: float(value)}
        else:
            super().__setattr__(name, value)

    def decode(self, z: Tensor) -> Tensor:
        """Latents [B, C, T, h, w] (of pictures [B, C, h, w]) -> [B, 3, F, H, W] (or [B, 3, H, W]) in -1..1."""
        return self._vae.decode(z).mul(2).sub(1).movedim(-1, 1)

    def encode(self, x: Tensor) -> Tensor:
        """[B, 3, F, H, W] (or [B, 3, H, W]) in -1..1 -> latents, as `decode` takes them."""
        return self._vae.encode(x.movedim(1, -1).add(1).div(2))
