"""A VAE's network for nodes of other packs that call it directly, by the names that the host's networks have."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

#: Attribute that nodes set on a host's network -> the decode option that it stands for.
SETTINGS = {"decode_timestep": "timestep", "decode_noise_scale": "noise"}


class _VAE(Protocol):
    #: Options of its decodes that were set on its network.
    decoder: dict[str, float]

    def decode(self, samples_in: Tensor) -> Tensor: ...
    def encode(self, pixel_samples: Tensor) -> Tensor: ...


class Direct:
    """A network with all its attributes, whose encoder and decoder are run by the engine under the settings of
    `vae`."""

    def __init__(self, network: nn.Module, vae: _VAE) -> None:
        """vae: a weak reference; otherwise it and everything it holds would wait for the garbage collector."""
        self._network, self._vae = network, vae

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS and SETTINGS[name] in self._vae.decoder:
            return self._vae.decoder[SETTINGS[name]]
        return getattr(object.__getattribute__(self, "_network"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Unlike on a host's network, `SETTINGS` count for this VAE alone, although others may share
        its weights."""
        if name in SETTINGS:
            self._vae.decoder = {**self._vae.decoder, SETTINGS[name]: float(value)}
        else:
            super().__setattr__(name, value)

    def decode(self, z: Tensor) -> Tensor:
        """Decode latents [B, C, T, h, w] (of pictures [B, C, h, w]) to [B, 3, F, H, W] (or [B, 3, H, W]) in -1..1."""
        return self._vae.decode(z).mul(2).sub(1).movedim(-1, 1)

    def encode(self, x: Tensor) -> Tensor:
        """Encode [B, 3, F, H, W] (or [B, 3, H, W]) in -1..1 to latents, as `decode` takes them."""
        return self._vae.encode(x.movedim(1, -1).add(1).div(2))
