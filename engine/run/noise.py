"""Normal noise by its place: what is drawn for one frame or layer never depends on what is drawn for others."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def drawn(seed: int, place: str, *shape: int) -> Tensor:
    """float32 on the CPU, the same on every machine. place: what it is for, in words."""
    digest = hashlib.sha256(f"{seed} {place}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator)


def with_noise(latent: Tensor, share: float, seed: int) -> Tensor:
    """Latents [B, C, T, h, w] of which `share` is noise, drawn for each clip and each frame in it."""
    noisy = torch.empty_like(latent)
    for clip in range(latent.shape[0]):
        for frame in range(latent.shape[2]):
            here = latent[clip, :, frame]
            noise = drawn(seed, f"latent {clip} {frame}", *here.shape).to(here)
            noisy[clip, :, frame] = here * (1.0 - share) + noise * share
    return noisy
