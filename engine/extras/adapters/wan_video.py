"""The interface of WanVideoWrapper's VAE object (its socket type WANVAE), seen in its version 1.4.5."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...vae import VideoVAE
from .stand_in import StandIn
from .tiles import Window, blended, edges


class WanVideoVAE(StandIn):
    """A stand-in for WanVideoWrapper's WanVideoVAE and WanVideoVAE38.

    Frames are in -1..1; latents are normalised with `mean` and `inv_std`, in float32. Results lie in host memory.

    Attributes:
        mean, inv_std: [1, C, 1, 1, 1] float32.
        z_dim: channels of a latent.
        upsampling_factor: pixels per latent, in rows and in columns.
        model: this object; callers move it alone.
    """

    def __init__(self, vae: VideoVAE, like: Any, *, tiles: str = "whole", **options: Any) -> None:
        """Wrap a VAE of Wan 2.1 or 2.2 (of any width).

        Args:
            vae: as `load` returns it.
            like: the pack's object or anything with its `mean`, `inv_std` and, if they are known, `dtype` (else
                float32).
            tiles: "whole" runs whole frames within the memory limit whatever tiles a call asks for; "theirs" runs
                those tiles, blended as the pack does.
            options: as for `StandIn`.

        Raises:
            InputError: a VAE of another family, or constants for other latents.
        """
        if vae.arch not in ("wan2.1", "wan2.2"):
            raise InputError(f"WanVideoVAE stands in for a VAE of Wan, and this one is {vae.arch}")
        super().__init__(vae, getattr(like, "dtype", torch.float32), tiles, **options)
        self.z_dim, self.upsampling_factor = vae.latent_channels, vae.spatial
        self.mean, self.inv_std = (self._constant(like, name) for name in ("mean", "inv_std"))

    def _constant(self, like: Any, name: str) -> Tensor:
        value = torch.as_tensor(getattr(like, name), dtype=torch.float32, device="cpu").flatten()
        if len(value) != self.z_dim:
            raise InputError(f"like.{name} has {len(value)} values, and latents of this VAE {self.z_dim} channels")
        return value.view(1, -1, 1, 1, 1)

    @property
    def model(self) -> WanVideoVAE:
        return self

    def clear_cache(self) -> None:
        """Do nothing: calls leave no history."""

    def decode(
        self, hidden_states: Iterable[Tensor], device: Any = None, tiled: bool = False, end_: bool = False,
        tile_size: tuple[int, int] = (34, 34), tile_stride: tuple[int, int] = (18, 16), pbar: bool = True,
        output_device: Any = None, output_dtype: torch.dtype | None = None, **_: Any,
    ) -> list[Tensor]:  # fmt: skip
        """Decode normalised latents.

        Args:
            hidden_states: [B, C, T, h, w], or B times [C, T, h, w].
            device, pbar: not used.
            tiled, tile_size, tile_stride: the caller's tiles, (rows, columns) in latents.
            end_: the last latent is a clip of its own, of one frame.
            output_device, output_dtype: of the results; None: the CPU, float32.

        Returns:
            B times [3, F, H, W] in -1..1; beyond it only without the caller's tiles.
        """
        s, out = self.upsampling_factor, []
        for z in hidden_states:
            z = z[None].float().cpu()
            if self.follows(tiled):
                rows, columns = (_windows(z.shape[3 + i], tile_size[i], tile_stride[i], s) for i in (0, 1))
                sides = s * z.shape[3], s * z.shape[4]
                run = functools.partial(self._decoded, ends=end_)
                y = blended(z, rows, columns, sides, run, torch.minimum).clamp(-1.0, 1.0)
            else:
                y = self._decoded(z, end_)
            out.append(y[0].to(output_device or "cpu", output_dtype or torch.float32))
        return out

    def _decoded(self, z: Tensor, ends: bool) -> Tensor:
        if ends:
            return torch.cat([self._decoded(z[:, :, :-1], False), self._decoded(z[:, :, -1:], False)], 2)
        return self.frames_of(z / self.inv_std + self.mean)

    def encode(
        self, videos: Iterable[Tensor], device: Any = None, tiled: bool = False, end_: bool = False,
        tile_size: tuple[int, int] | None = None, tile_stride: tuple[int, int] | None = None, pbar: bool = True,
        sample: bool = False, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Encode clips to normalised latents [B, C, T, h, w], float32, on `device`.

        Frames after the first that fill no latent are left out.

        Args:
            videos: B times [3, F, H, W] in -1..1.
            tiled, tile_size, tile_stride: the caller's tiles, (rows, columns) in latents; None: half the frame, every
                half tile.
            end_: the last frame is a clip of its own.
            sample: a sample (noise from torch's generator of `device`) instead of the mean; not in tiles, nor with
                Wan 2.2.
        """
        s, out = self.upsampling_factor, []
        for x in videos:
            x = x[None]
            if self.follows(tiled):
                sides = x.shape[3:]
                sizes = [n // 2 for n in sides] if tile_size is None else [n * s for n in tile_size]
                strides = [n // 2 for n in sizes] if tile_size is None else [n * s for n in tile_stride]
                rows, columns = (_windows(sides[i], sizes[i], strides[i], 1 / s) for i in (0, 1))
                run = functools.partial(self._encoded, ends=end_)
                y = blended(x, rows, columns, tuple(n // s for n in sides), run, torch.minimum)
            else:
                y = self._encoded(x, end_, device if sample and self.vae.arch == "wan2.1" else None, sample)
            out.append(y[0].to(device))
        return torch.stack(out)

    def _encoded(self, x: Tensor, ends: bool, noisy: Any = None, sample: bool = False) -> Tensor:
        rate = self.vae.temporal
        if ends:
            count = 1 + rate * ((x.shape[2] - 2) // rate)
            return torch.cat([self._encoded(x[:, :, :count], False), self._encoded(x[:, :, -1:], False)], 2)
        mean, logvar = self.moments_of(x)
        latent = (mean - self.mean) * self.inv_std
        if not sample or self.vae.arch != "wan2.1":
            return latent
        # As the pack does it: the noise is not divided by the latents' deviation.
        noise = torch.randn(latent.shape, device=noisy, dtype=torch.float32)
        return latent + torch.exp(0.5 * logvar) * noise.cpu()


def _windows(length: int, size: int, stride: int, scale: float) -> Sequence[Window]:
    """Return the tiles on one axis: one every `stride` until a tile reaches the end, with linear ramps on inner sides.

    scale: output samples per input sample; places are rounded down."""

    def out(n: int) -> int:
        return int(n * scale) if scale >= 1 else n // round(1 / scale)

    shared = out(size - stride)
    ramp = torch.arange(1, shared + 1, dtype=torch.float32, device="cpu") / max(shared, 1)
    windows = []
    for start in range(0, length, stride):
        if start >= stride and start - stride + size >= length:
            break
        inner = start > 0, start + size < length
        weights = functools.partial(edges, before=ramp if inner[0] else None, after=ramp.flip(0) if inner[1] else None)
        windows.append(Window(start, min(start + size, length), out(start), weights))
    return windows
