"""Latents and videos as users hand them in: their shapes, and whether they hold numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError


def check_latent(latent: Tensor, channels: int) -> Tensor:
    """[C, T, h, w] or [B, C, T, h, w] -> the latter. Raises InputError."""
    z = latent.unsqueeze(0) if latent.ndim == 4 else latent
    c = channels
    if z.ndim != 5 or z.shape[1] != c:
        raise InputError(f"a latent of this VAE is [B, {c}, T, h, w] or [{c}, T, h, w], not {list(latent.shape)}")
    if min(z.shape) < 1:
        raise InputError(f"the latent {list(latent.shape)} is empty: it needs at least one frame and pixel")
    if not torch.isfinite(z).all():
        raise InputError("the latent holds NaN or Inf: the step that made it failed")
    return z


def check_video(video: Tensor, spatial: int) -> Tensor:
    """[F, H, W, 3] or [B, F, H, W, 3] -> the latter; `spatial` pixels per side are the least. Raises InputError."""
    x = video.unsqueeze(0) if video.ndim == 4 else video
    if x.ndim != 5 or x.shape[-1] != 3:
        raise InputError(f"video frames are [B, F, H, W, 3] or [F, H, W, 3], not {list(video.shape)}")
    if x.shape[0] < 1 or x.shape[1] < 1:
        raise InputError(f"the video {list(video.shape)} has no frames")
    if min(x.shape[2:4]) < spatial:
        least = f"{spatial}x{spatial}"
        raise InputError(f"frames of {x.shape[3]}x{x.shape[2]} are too small: at least {least} pixels")
    if x.dtype != torch.uint8 and not all(torch.isfinite(f).all() for clip in x for f in clip):
        raise InputError("the video holds NaN or Inf")
    return x
