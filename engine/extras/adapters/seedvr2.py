"""The interface of the SeedVR2 upscaler's VAE, seen in its version 2.5.24."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...vae import VideoVAE
from .stand_in import StandIn
from .tiles import Window, blended, edges


class Posterior(NamedTuple):
    """Mean and log of the variance of a latent."""

    mean: Tensor
    logvar: Tensor

    def mode(self) -> Tensor:
        return self.mean


class Encoded(NamedTuple):
    """Result of an encode: the mean, without a time axis where it is one latent long, and the whole posterior."""

    latent: Tensor
    posterior: Posterior


class Decoded(NamedTuple):
    """Result of a decode: frames, without a time axis where there is one."""

    sample: Tensor


class SeedVR2VAE(StandIn):
    """A stand-in for the upscaler's VideoAutoencoderKLWrapper. Frames are in -1..1 and beyond, latents the network's
    own; results have the type and the device of the input."""

    spatial_downsample_factor, temporal_downsample_factor = 8, 4

    def __init__(
        self, vae: VideoVAE, *, dtype: torch.dtype = torch.float32, tiles: str = "whole", **options: Any
    ) -> None:
        """Wrap a SeedVR2 VAE.

        Args:
            vae: as `load` returns it.
            dtype: the caller's computing type.
            tiles: "whole" runs whole frames within the memory limit whatever tiles a call asks for; "theirs" runs
                those tiles, blended as the upscaler does.
            options: as for `StandIn`.

        Raises:
            InputError: a VAE of another family.
        """
        if vae.arch != "seedvr2":
            raise InputError(f"SeedVR2VAE stands in for SeedVR2's VAE, and this one is {vae.arch}")
        super().__init__(vae, dtype, tiles, **options)

    def preprocess(self, x: Tensor) -> Tensor:
        """Return frames [B, 3, F, H, W] or [B, 3, H, W] as they are. Raises InputError unless F is 4n + 1."""
        if x.ndim == 5 and x.shape[2] % 4 != 1:
            raise InputError(f"SeedVR2 takes 4n + 1 frames, not {x.shape[2]}")
        return x

    def postprocess(self, x: Tensor) -> Tensor:
        """Return frames as they are."""
        return x

    def decode(
        self, z: Tensor, return_dict: bool = True, tiled: bool = False, tile_size: tuple[int, int] = (512, 512),
        tile_overlap: tuple[int, int] = (64, 64), **_: Any,
    ) -> Decoded:  # fmt: skip
        """Decode latents [B, 16, T, h, w] or [B, 16, h, w]. Sizes of the caller's tiles are (rows, columns) in
        pixels."""
        given = z[:, :, None] if z.ndim == 4 else z
        sides, tile = given.shape[3:], [max(1, n // 8) for n in tile_size]
        if self.follows(tiled) and (sides[0] > tile[0] or sides[1] > tile[1]):
            over = tile_overlap
            rows, columns = (_windows(sides[i], tile[i], over[i] // 8, 1, 8, over[i]) for i in (0, 1))
            y = blended(given, rows, columns, (8 * sides[0], 8 * sides[1]), self.frames_of, torch.mul, 1e-6)
        else:
            y = self.frames_of(given)
        return Decoded(y.to(z).squeeze(2))

    def encode(
        self, x: Tensor, return_dict: bool = True, tiled: bool = False, tile_size: tuple[int, int] = (512, 512),
        tile_overlap: tuple[int, int] = (64, 64), **_: Any,
    ) -> Encoded:  # fmt: skip
        """Encode frames [B, 3, F, H, W] or [B, 3, H, W]. Sizes as in `decode`."""
        given = x[:, :, None] if x.ndim == 4 else x
        height, width = given.shape[3:]
        if self.follows(tiled) and (height > tile_size[0] or width > tile_size[1]):
            sides, tile = (-(-height // 8), -(-width // 8)), [max(1, n // 8) for n in tile_size]
            over = [n // 8 for n in tile_overlap]
            rows, columns = (_windows(sides[i], tile[i], over[i], 8, 1, over[i]) for i in (0, 1))
            moments = blended(given, rows, columns, sides, self._moments, torch.mul, 1e-6)
        else:
            moments = self._moments(given)
        mean, logvar = (part.to(x) for part in moments.chunk(2, 1))
        return Encoded(mean.squeeze(2), Posterior(mean, logvar))

    def _moments(self, x: Tensor) -> Tensor:
        return torch.cat(self.moments_of(x), 1)


def _windows(length: int, size: int, overlap: int, before: int, after: int, ramp: int) -> Sequence[Window]:
    """Return the tiles on one axis, with cosine ramps on inner sides.

    Args:
        length, size, overlap: in latents.
        before, after: input and output samples per latent.
        ramp: output samples that a ramp is made for; no more than a tile has, less one, are used.
    """
    overlap = max(0, min(overlap, size - 1))
    if before > after:
        ramp = overlap
    rise = 0.5 - 0.5 * torch.cos(torch.linspace(0, 1, ramp, dtype=torch.float32, device="cpu") * torch.pi)
    windows = []
    for start in range(0, length, max(1, size - overlap)):
        end = min(start + size, length)
        if start and end - start <= overlap:
            continue
        used = rise[: max(0, min(ramp, (end - start) * after - 1))]
        inner = start > 0, end < length
        weights = functools.partial(edges, before=used if inner[0] else None, after=1 - used if inner[1] else None)
        windows.append(Window(start * before, end * before, start * after, weights))
    return windows
