"""Clips cut from a pool of canvases: camera paths, moving objects that cover each other, changing light."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .canvases import shape_mask, uniform


def _maybe(g: torch.Generator, share: float, *shape: int) -> Tensor:
    return (torch.rand(*shape, generator=g, device=g.device) < share).float()


def _path(g: torch.Generator, b: int, frames: int, still: float, fastest: float) -> Tensor:
    """Return offsets [b, frames, 2] in pixels: constant velocity (log-uniform up to `fastest` px/frame) plus a sway."""
    t = torch.arange(frames, device=g.device).view(1, frames, 1)
    speed = fastest * 2 ** uniform(g, -5, 0, b, 1, 1) * (1 - _maybe(g, still, b, 1, 1))
    heading = uniform(g, 0, 2 * math.pi, b, 1, 1)
    direction = torch.cat((heading.cos(), heading.sin()), 2)
    sway = uniform(g, 0, 2.5, b, 1, 2) * _maybe(g, 0.3, b, 1, 1)
    return speed * direction * t + sway * torch.sin(t * uniform(g, 0.1, 0.7, b, 1, 2))


def _layer(g: torch.Generator, pool: Tensor, b: int, x: Tensor, y: Tensor, offset: Tensor, mode: str) -> Tensor:
    """Sample random canvases under a random similarity that changes over time: [b, 3, F, H, W]."""
    frames, h, w = offset.shape[1], x.shape[0], x.shape[1]
    side = pool.shape[2]
    t = torch.arange(frames, device=g.device).view(1, frames, 1, 1)

    def drift() -> Tensor:
        return t * uniform(g, -0.03, 0.03, b, 1, 1, 1) * _maybe(g, 0.4, b, 1, 1, 1)

    zoom = 2 ** (uniform(g, -1.3, 0.35, b, 1, 1, 1) + drift())
    turn = uniform(g, -0.3, 0.3, b, 1, 1, 1) + drift()
    wave = uniform(g, 0, 3, b, 1, 1, 1) * _maybe(g, 0.12, b, 1, 1, 1)
    px, py = x - offset[..., 0, None, None], y - offset[..., 1, None, None]
    px = px + wave * torch.sin(y / 17 + t * 0.4)
    centre = uniform(g, -0.3, 0.3, b, 2, 1, 1, 1) * side
    u = zoom * (px * turn.cos() + py * turn.sin()) + centre[:, 0]
    v = zoom * (py * turn.cos() - px * turn.sin()) + centre[:, 1]
    grid = torch.stack((u, v), -1).flatten(1, 2) * (2 / side)
    index = torch.randint(len(pool), (b,), generator=g, device=g.device)
    picture = pool[index].float() / 255
    out = F.grid_sample(picture, grid, mode, "reflection", align_corners=False)
    return out.view(b, 3, frames, h, w)


def clips(
    g: torch.Generator, pool: Tensor, b: int, frames: int, height: int, width: int, objects: int = 2,
    mode: str = "bicubic",
) -> Tensor:
    """Return `b` clips [b, frames, height, width, 3], float32 in -1..1; `objects`: the most moving shapes in one.

    Canvas pixels per output pixel run from 0.4 to 1.3; backgrounds move up to 4 px/frame (30 % stand still), objects up
    to 6 px/frame.
    """
    y, x = torch.meshgrid(
        torch.arange(height, device=g.device) - height / 2, torch.arange(width, device=g.device) - width / 2,
        indexing="ij",
    )
    offset = _path(g, b, frames, 0.3, 4)
    out = _layer(g, pool, b, x, y, offset, mode)
    for _ in range(objects):
        own = _path(g, b, frames, 0.2, 6)
        start = torch.stack((uniform(g, -0.5, 0.5, b, 1) * width, uniform(g, -0.5, 0.5, b, 1) * height), 2)
        dx, dy = (p - (own + start)[..., i, None, None] for i, p in ((0, x), (1, y)))
        radius = min(height, width) * 2 ** uniform(g, -4, -1.2, b) * _maybe(g, 0.6, b)
        alpha = shape_mask(g, dx, dy, radius, 2 ** uniform(g, 0, 2, b)) * (radius > 0).view(b, 1, 1, 1)
        out = torch.lerp(out, _layer(g, pool, b, x, y, own, mode), alpha[:, None])
    t = torch.arange(frames, device=g.device).view(1, 1, frames, 1, 1)
    light = uniform(g, -0.25, 0.25, b, 1, 1, 1, 1) * _maybe(g, 0.25, b, 1, 1, 1, 1)
    out = out * (1 + light * torch.sin(t * uniform(g, 0.05, 0.6, b, 1, 1, 1, 1)))
    return (out.clamp(0, 1) * 2 - 1).permute(0, 2, 3, 4, 1).contiguous()
