"""Small staged scenes: a camera moves over a picture while marbles roll across it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SUPERSAMPLE = 2
LIGHT = (-0.45, -0.65, 0.61)


@dataclass(frozen=True)
class Camera:
    """The position of the frame's centre in the picture (0..1) and picture pixels per frame pixel, at start and end."""

    x: tuple[float, float]
    y: tuple[float, float]
    zoom: tuple[float, float]
    turn: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Marble:
    """A textured ball: uint8 [H, W, 3] texture, path of the centre in shares of the frame, radius in pixels."""

    texture: np.ndarray
    x: tuple[float, float]
    y: tuple[float, float]
    radius: float
    spin: tuple[float, float] = (0.0, 1.5)
    scale: float = 0.5


def _between(ends: tuple[float, float], t: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * t


def _sample(picture: np.ndarray, u: Tensor, v: Tensor) -> Tensor:
    """Return bicubic samples [3, H, W] in 0..1 at pixel positions, mirrored beyond the border."""
    x = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 255
    grid = torch.stack((2 * u / x.shape[3] - 1, 2 * v / x.shape[2] - 1), -1)[None]
    return F.grid_sample(x, grid, "bicubic", "reflection", align_corners=False)[0].clamp(0, 1)


def _add_marble(frame: Tensor, marble: Marble, x: Tensor, y: Tensor, t: float) -> Tensor:
    """Draw the shadow, then the ball itself: texture wrapped round the sphere, diffuse light and a highlight."""
    h, w = frame.shape[1] / SUPERSAMPLE, frame.shape[2] / SUPERSAMPLE
    r = marble.radius
    dx, dy = (x - _between(marble.x, t) * w) / r, (y - _between(marble.y, t) * h) / r
    reach = ((dx - 0.35) / 1.15) ** 2 + ((dy - 0.75) / 0.5) ** 2
    frame = frame * (1 - 0.6 * torch.exp(-1.5 * reach))
    rr = dx**2 + dy**2
    nz = (1 - rr).clamp(min=0).sqrt()
    spin = _between(marble.spin, t)
    along, depth = dx * math.cos(spin) - nz * math.sin(spin), dx * math.sin(spin) + nz * math.cos(spin)
    th, tw = marble.texture.shape[:2]
    u = (torch.atan2(along, depth) / math.pi * marble.scale + 0.5) * tw
    v = (torch.asin(dy.clamp(-1, 1)) / math.pi * marble.scale + 0.5) * th
    lit = (dx * LIGHT[0] + dy * LIGHT[1] + nz * LIGHT[2]).clamp(min=0)
    gloss = (2 * lit * nz - LIGHT[2]).clamp(min=0) ** 24
    ball = (_sample(marble.texture, u, v) * (0.3 + 0.85 * lit) + 0.7 * gloss).clamp(0, 1)
    return torch.lerp(frame, ball, ((1 - rr.sqrt()) * r + 0.5).clamp(0, 1))


def render(
    picture: np.ndarray, camera: Camera, marbles: tuple[Marble, ...], frames: int, height: int, width: int
) -> np.ndarray:
    """Render uint8 [frames, height, width, 3]; each pixel averages SUPERSAMPLE x SUPERSAMPLE samples."""
    steps = [(torch.arange(n * SUPERSAMPLE) + 0.5) / SUPERSAMPLE for n in (height, width)]
    y, x = torch.meshgrid(*steps, indexing="ij")
    out = []
    for i in range(frames):
        t = i / max(1, frames - 1)
        zoom, turn = _between(camera.zoom, t), _between(camera.turn, t)
        px, py = (x - width / 2) * zoom, (y - height / 2) * zoom
        u = px * math.cos(turn) + py * math.sin(turn) + _between(camera.x, t) * picture.shape[1]
        v = py * math.cos(turn) - px * math.sin(turn) + _between(camera.y, t) * picture.shape[0]
        frame = _sample(picture, u, v)
        for marble in marbles:
            frame = _add_marble(frame, marble, x, y, t)
        frame = F.avg_pool2d(frame[None], SUPERSAMPLE)[0]
        out.append((frame * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
    return np.stack(out)
