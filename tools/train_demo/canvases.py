"""Still pictures to train on: augmented real ones and procedural ones (dead leaves, noise, writing).

Canvases are made on the training device as uint8 [N, 3, SIDE, SIDE], a pool that clips are then cut from.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIDE = 512


def uniform(g: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=g, device=g.device) * (high - low) + low


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur [N, C, H, W] by a Gaussian with its own sigma (pixels) per sample, by FFT (wraps around)."""
    fy = torch.fft.fftfreq(x.shape[2], device=x.device)[:, None]
    fx = torch.fft.rfftfreq(x.shape[3], device=x.device)[None]
    gain = torch.exp(-2 * (math.pi * sigma.view(-1, 1, 1, 1)) ** 2 * (fy**2 + fx**2))
    return torch.fft.irfft2(torch.fft.rfft2(x) * gain, s=x.shape[2:])


def coloured_noise(g: torch.Generator, n: int, side: int = SIDE) -> Tensor:
    """Return 1/f^a noise, a in 0.7..2.2 per sample, drawn out up to 4 times along one direction (fur, wood), three
    partly correlated channels, mean 0, std 1: [n, 3, side, side]."""
    fy = torch.fft.fftfreq(side, device=g.device)[:, None]
    fx = torch.fft.rfftfreq(side, device=g.device)[None]
    angle, stretch = uniform(g, 0, math.pi, n, 1, 1, 1), 2 ** uniform(g, 0, 2, n, 1, 1, 1)
    along, across = fx * angle.cos() + fy * angle.sin(), fy * angle.cos() - fx * angle.sin()
    f = ((along * stretch) ** 2 + across**2).sqrt().clamp(min=1.0 / side)
    white = torch.randn(n, 4, side, side, generator=g, device=g.device)
    x = torch.fft.irfft2(torch.fft.rfft2(white) * f ** -uniform(g, 0.7, 2.2, n, 1, 1, 1), s=(side, side))
    x = x / x.std((2, 3), keepdim=True)
    own = uniform(g, 0.0, 0.7, n, 1, 1, 1)
    x = x[:, :1] * (1 - own) + x[:, 1:] * own
    return x / x.std((1, 2, 3), keepdim=True)


def stripes(g: torch.Generator, n: int, side: int = SIDE) -> Tensor:
    """Return waves, hard stripes and checks at random angle and period, slightly bent: [n, 3, side, side] in -1..1."""
    y, x = torch.meshgrid(*(torch.arange(side, device=g.device, dtype=torch.float32),) * 2, indexing="ij")
    angle, period = uniform(g, 0, math.pi, n, 1, 1), 2 ** uniform(g, 2, 6, n, 1, 1)
    bend = uniform(g, 0, 6, n, 1, 1) * torch.sin(2 * math.pi * (x + y) / uniform(g, 60, 300, n, 1, 1))
    u = (x * angle.cos() + y * angle.sin() + bend) / period
    v = (y * angle.cos() - x * angle.sin()) / period
    wave = torch.sin(2 * math.pi * u)
    check = torch.rand(n, 1, 1, generator=g, device=g.device) < 0.4
    wave = torch.where(check, wave * torch.sin(2 * math.pi * v), wave)
    hard = 2 ** uniform(g, 0, 4, n, 1, 1)
    wave = torch.tanh(wave * hard) / torch.tanh(hard)
    return wave[:, None] * uniform(g, 0.4, 1, n, 3, 1, 1)


class Palette:
    """Colours that occur in the real pictures: random pixels of them, now and then any colour."""

    def __init__(self, pictures: list[Tensor]) -> None:
        self.pixels = torch.cat([p.flatten(1).T[::7] for p in pictures])

    def draw(self, g: torch.Generator, *shape: int) -> Tensor:
        """Return random colours [*shape, 3] in 0..1."""
        index = torch.randint(len(self.pixels), shape, generator=g, device=g.device)
        free = torch.rand(*shape, 1, generator=g, device=g.device) < 0.15
        return torch.where(free, torch.rand(*shape, 3, generator=g, device=g.device), self.pixels[index])


def shape_mask(g: torch.Generator, x: Tensor, y: Tensor, radius: Tensor, soft: Tensor) -> Tensor:
    """Return the coverage 0..1 of one random shape per sample; x, y [N, ...] are positions relative to its centre in
    pixels.

    Three kinds: super-ellipses (discs to rectangles), regular-ish polygons and wavy blobs; edges `soft` pixels wide.
    """
    n, tail = len(x), (1,) * (x.ndim - 1)

    def rand(low: float, high: float) -> Tensor:
        return uniform(g, low, high, n, *tail)

    turn = rand(0, 2 * math.pi)
    u, v = x * turn.cos() + y * turn.sin(), (y * turn.cos() - x * turn.sin()) * rand(1, 3)
    power = 2 ** rand(1, 3)
    r = (u * u + v * v).sqrt()
    theta = torch.atan2(v, u)
    super_r = (u.abs() ** power + v.abs() ** power + 1e-6) ** (1 / power)
    corners = rand(3, 7.999).floor()
    sector = 2 * math.pi / corners
    polygon_r = r * torch.cos(torch.remainder(theta, sector) - sector / 2) / torch.cos(sector / 2)
    blob_r = r / (1 + rand(0, 0.35) * torch.sin(theta * corners + turn) + rand(0, 0.2) * torch.cos(2 * theta))
    kind = rand(0, 3)
    distance = torch.where(kind < 1, super_r, torch.where(kind < 2, polygon_r, blob_r))
    return ((radius.view(n, *tail) - distance) / soft.view(n, *tail) + 0.5).clamp(0, 1)


def dead_leaves(g: torch.Generator, palette: Palette, n: int, leaves: int = 300, side: int = SIDE) -> Tensor:
    """Return overlapping textured shapes with a power law of sizes, whose statistics come close to photographs'.

    Returns [n, 3, side, side] in 0..1.
    """
    textures = torch.stack([coloured_noise(g, n, side), coloured_noise(g, n, side), stripes(g, n, side)], 1)
    y, x = torch.meshgrid(*(torch.arange(side, device=g.device, dtype=torch.float32),) * 2, indexing="ij")
    rows = torch.arange(n, device=g.device)
    low, high = uniform(g, 5, 25, n), uniform(g, 100, 260, n)
    picture = palette.draw(g, n)[:, :, None, None] + 0.1 * textures[:, 0]
    sizes = torch.rand(leaves, n, generator=g, device=g.device)
    radii = (high**-1 + sizes * (low**-1 - high**-1)) ** -1  # density ~ r^-2: the big ones are not lost
    for radius in radii:
        centre = uniform(g, 0, side, n, 2, 1, 1)
        dx, dy = x - centre[:, 0], y - centre[:, 1]
        alpha = shape_mask(g, dx, dy, radius, 2 ** uniform(g, 0, 3, n))[:, None]
        colour = palette.draw(g, n)[:, :, None, None]
        slope = uniform(g, -0.25, 0.25, n, 2, 1, 1) * (torch.rand(n, 1, 1, 1, generator=g, device=g.device) < 0.6)
        shade = ((dx * slope[:, 0] + dy * slope[:, 1]) / radius.view(n, 1, 1))[:, None]
        texture = textures[rows, torch.randint(3, (n,), generator=g, device=g.device)]
        gain = 0.2 * torch.rand(n, 1, 1, 1, generator=g, device=g.device) ** 2
        picture = torch.lerp(picture, colour + shade + gain * texture, alpha)
    return blur(picture, uniform(g, 0, 1.6, n)).clamp(0, 1)


def clouds(g: torch.Generator, palette: Palette, n: int, side: int = SIDE) -> Tensor:
    """Return smooth gradients between two colours driven by noise, with a little finer texture: [n, 3, side, side]."""
    a, b = palette.draw(g, n)[:, :, None, None], palette.draw(g, n)[:, :, None, None]
    t = blur(coloured_noise(g, n, side)[:, :1], uniform(g, 2, 30, n))
    t = torch.sigmoid(2 * t / t.std((2, 3), keepdim=True))
    return (torch.lerp(a, b, t) + uniform(g, 0, 0.08, n, 1, 1, 1) * coloured_noise(g, n, side)).clamp(0, 1)


def writing(rng: np.random.Generator, n: int, side: int = SIDE) -> Tensor:
    """Return lines of random letters and pen strokes in random colours and sizes: [n, 3, side, side] in 0..1."""
    pages = []
    letters = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?()")
    for _ in range(n):
        paper, ink = (tuple(int(c) for c in rng.integers(0, 256, 3)) for _ in range(2))
        page = Image.new("RGB", (side, side), paper)
        draw = ImageDraw.Draw(page)
        size = int(rng.integers(12, 64))
        font = ImageFont.load_default(size)
        for y in range(0, side, int(size * 1.4)):
            draw.text((int(rng.integers(-20, 20)), y), "".join(rng.choice(letters, 90)), fill=ink, font=font)
        for _ in range(int(rng.integers(0, 12))):
            points = rng.integers(0, side, (4, 2)) + rng.normal(0, 20, (4, 2))
            colour = tuple(int(c) for c in rng.integers(0, 256, 3))
            draw.line([tuple(p) for p in points.tolist()], fill=colour, width=int(rng.integers(1, 12)), joint="curve")
        pages.append(torch.from_numpy(np.asarray(page).copy()))
    return torch.stack(pages).permute(0, 3, 1, 2).float() / 255


def augmented(g: torch.Generator, palette: Palette, pictures: list[Tensor], n: int, side: int = SIDE) -> Tensor:
    """Return rotated, scaled, mirrored and recoloured cuts of the real pictures ([3, H, W] in 0..1): [n, 3, side,
    side]."""
    out = []
    lin = torch.linspace(-1, 1, side, device=g.device) * side / 2
    y, x = torch.meshgrid(lin, lin, indexing="ij")
    weights = torch.tensor([float(p.shape[1] * p.shape[2]) ** 0.5 for p in pictures], device=g.device)
    for index in torch.multinomial(weights, n, replacement=True, generator=g).tolist():
        p = pictures[index]
        _, h, w = p.shape
        zoom, turn, cx, cy, flip, upright = uniform(g, 0, 1, 6).tolist()
        zoom = 2 ** (zoom * 1.7 - 1)  # source pixels per canvas pixel, 0.5..1.6
        turn = 2 * math.pi * turn if upright < 0.5 else 0.1 * (turn - 0.5)
        dx, dy = x * zoom * (1 if flip < 0.5 else -1), y * zoom
        sx = dx * math.cos(turn) + dy * math.sin(turn) + w * (0.2 + 0.6 * cx)
        sy = dy * math.cos(turn) - dx * math.sin(turn) + h * (0.2 + 0.6 * cy)
        grid = torch.stack((2 * sx / w - 1, 2 * sy / h - 1), -1)[None]
        out.append(F.grid_sample(p[None], grid, "bicubic", "reflection", align_corners=False))
    return recolour(g, palette, torch.cat(out).clamp(0, 1))


def recolour(g: torch.Generator, palette: Palette, x: Tensor) -> Tensor:
    """Apply random gain, gamma and colour mix per sample; a fifth is mapped to a ramp of three colours by
    brightness."""
    n = len(x)
    y = x ** (2 ** uniform(g, -0.6, 0.6, n, 1, 1, 1))
    mix = torch.eye(3, device=x.device) + uniform(g, -0.25, 0.25, n, 3, 3)
    mix = mix / mix.sum(2, keepdim=True)
    y = torch.einsum("nij,njhw->nihw", mix, y) * uniform(g, 0.8, 1.15, n, 3, 1, 1)
    low, middle, high = (palette.draw(g, n)[:, :, None, None] for _ in range(3))
    t = x.mean(1, keepdim=True)
    ramp = torch.where(t < 0.5, torch.lerp(low, middle, 2 * t), torch.lerp(middle, high, 2 * t - 1))
    pick = torch.rand(n, 1, 1, 1, generator=g, device=x.device)
    return torch.where(pick < 0.4, x, torch.where(pick < 0.8, y, 0.7 * ramp + 0.3 * x)).clamp(0, 1)


def make_pool(pictures: list[Tensor], n: int, seed: int, device: torch.device | str, side: int = SIDE) -> Tensor:
    """Make a pool, half real, a third dead leaves, the rest clouds and writing: uint8 [n, 3, side, side] on `device`.

    `pictures`: uint8 [3, H, W] each. Deterministic for a seed on one kind of device.
    """
    g = torch.Generator(device).manual_seed(seed)
    sources = [p.to(device).float() / 255 for p in pictures]
    palette = Palette(sources)
    leaves, cloud, text = max(1, n * 36 // 100), max(1, n // 10), max(1, n // 25)
    parts = [augmented(g, palette, sources, n - leaves - cloud - text, side), clouds(g, palette, cloud, side)]
    parts += [dead_leaves(g, palette, min(64, leaves - i), side=side) for i in range(0, leaves, 64)]
    parts.append(writing(np.random.default_rng(seed), text, side).to(device))
    return torch.cat([(p * 255).round().to(torch.uint8) for p in parts])
