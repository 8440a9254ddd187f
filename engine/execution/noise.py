"""Normal noise that is part of decoders' latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..network.state import drawn
from ..network.steps import Latents


def with_noise(latent: Tensor, share: float, seed: int) -> Tensor:
    """Return latents [B, C, T, h, w] with a `share` of noise, drawn for each clip and each frame in it."""
    return torch.stack([_noisy(z, share, seed, clip, 0) for clip, z in enumerate(latent)])


def _noisy(part: Tensor, share: float, seed: int, clip: int, first: int) -> Tensor:
    """Add noise to part [C, n, h, w] of a clip, from its latent `first` on; float32, whatever type the latents have."""
    noisy = torch.empty_like(part, dtype=torch.float32)
    for frame in range(part.shape[1]):
        here = part[:, frame].float()
        noise = drawn(seed, f"latent {clip} {first + frame}", *here.shape).to(here)
        noisy[:, frame] = here * (1.0 - share) + noise * share
    return noisy


class Noisy:
    """Latents that are read when they are needed, with noise as from `with_noise`."""

    def __init__(self, latents: Latents, share: float, seed: int) -> None:
        self._latents, self._share, self._seed = latents, share, seed
        self.shape = latents.shape

    def __getitem__(self, place: tuple[int, slice, slice]) -> Tensor:
        clip, _, frames = place
        return _noisy(self._latents[place], self._share, self._seed, clip, frames.indices(self.shape[2])[0])


def noised(
    latents: Tensor | Latents, seed: int | None, noise: float | None, config: Any, name: str
) -> tuple[Tensor | Latents, int | None]:
    """Return latents with the noise that a decoder expects, and the seed of the noise it adds itself or None.

    Args:
        latents: [B, C, T, h, w].
        seed: of the noise; None for 0.
        noise: share of noise in the latents' values; None for `usual`.
        config: of the file's networks: `noise` is the share that it states, none if the decoder takes no noise;
            `begins_with_noise` if there is noise beside the latents.
        name: name of the family.

    Raises: InputError if the decoder takes no noise, or for a share outside 0 to 1.
    """
    usual = getattr(config, "noise", 0.0)
    if getattr(config, "begins_with_noise", False):
        if noise:
            raise InputError(f"the latents of {name} take no share of noise: leave noise out")
        return latents, seed
    if not usual and (seed is not None or noise):
        raise InputError(f"the decoder of {name} takes no noise: leave seed and noise out")
    share = usual if noise is None else noise
    if not 0.0 <= share <= 1.0:
        raise InputError(f"noise={noise} is not a share: give 0 to 1")
    if not share:
        return latents, None
    made = with_noise if isinstance(latents, Tensor) else Noisy
    return made(latents, share, seed or 0), seed or 0
