"""What the engine needs to know of an architecture besides its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..runtime.state import State


class Decoder(Protocol):
    """Latents -> features -> frames, in three parts with their own granularity.

    `low` and `mid` take latents [B, C, n, h, w], `high` any number of what mid makes of them; tiles start at
    mid's input, so that whatever must see whole frames is in low. Result: [B, 3, f, H, W] about -1..1.
    """

    def low(self, z: Tensor, state: State | None = None) -> Tensor: ...
    def mid(self, x: Tensor, state: State | None = None) -> Tensor: ...
    def high(self, x: Tensor, state: State | None = None) -> Tensor: ...


class Encoder(Protocol):
    """Frames -> features at latent resolution -> moments [B, 2C, n, h, w].

    `high` takes any number of frames [B, 3, f, H, W], `mid` what came of 1 + 4n of them first and of 4n later, `low`
    latents; tiles end at low's input.
    """

    def high(self, x: Tensor, state: State | None = None) -> Tensor: ...
    def mid(self, x: Tensor, state: State | None = None) -> Tensor: ...
    def low(self, x: Tensor, state: State | None = None) -> Tensor: ...


class Network(nn.Module):
    """Both halves of a VAE with the parameter names of its files. An absent half is None."""

    config: Any
    encoder: nn.Module | None
    decoder: nn.Module | None

    @staticmethod
    def sample(moments: Tensor, seed: int | None = None) -> Tensor:
        """Moments -> latent: the mean, or with a seed mean + std * noise (same noise on every device)."""
        mean, logvar = moments.chunk(2, 1)
        if seed is None:
            return mean
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(mean.shape, generator=generator).to(mean)
        return torch.addcmul(mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0)), noise)


@dataclass(frozen=True)
class Architecture:
    """Name (that of its key set in checkpoint/names.py), compression factors and constructors of one VAE family.

    `configure(shapes, norm_groups)` reads the sizes from a file's tensor shapes; `build(config)` makes the module.
    """

    name: str
    spatial: int
    temporal: int
    #: Latents outside the network are the network's times this.
    scale: float
    configure: Callable[[Mapping[str, tuple[int, ...]], int | None], Any]
    build: Callable[[Any], Network]
    #: The network's children that make up each half.
    decoder_parts: tuple[str, ...] = ("decoder",)
    encoder_parts: tuple[str, ...] = ("encoder",)
    #: What precision "auto" means on a GPU that computes in it.
    native: str = "fp16"
