"""What is measured: weights and inputs, the same for this pack and every peer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..archs.seedvr2 import ARCHITECTURE, Config
from ..errors import InputError
from ..files.checkpoint import Checkpoint, read_checkpoint
from ..loader import demo_vae_path

#: The widths of the published SeedVR2 VAE.
PUBLISHED = Config((128, 256, 512, 512), (128, 256, 512, 512))
RANDOM, DEMO = "random", "demo"


def default_weights(device: torch.device) -> str:
    """Full width on a GPU; on a CPU the demo VAE, because full width takes minutes per frame there."""
    return RANDOM if device.type == "cuda" else DEMO


def read_weights(weights: str) -> Checkpoint:
    """`random` (published widths, seed 0), `demo`, or a file."""
    if weights == RANDOM:
        return random_checkpoint(PUBLISHED)
    return read_checkpoint(demo_vae_path() if weights == DEMO else Path(weights))


def random_checkpoint(config: Config, seed: int = 0) -> Checkpoint:
    """Seeded fp16 weights scaled so that activations stay of order one: time and memory are those of real weights."""
    with torch.device("meta"):
        model = ARCHITECTURE.build(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, p in sorted(model.named_parameters()):
        draw = torch.randn(p.shape, generator=generator)
        if p.ndim >= 2:
            draw *= 1.2 / p[0].numel() ** 0.5
        else:
            draw = 1 + 0.2 * draw if "norm" in name and name.endswith("weight") else 0.1 * draw
        tensors[name] = draw.half()
    return Checkpoint(tensors, {"norm_num_groups": str(config.norm_groups)})


def copy_of(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors in a new Checkpoint: `load` uses up the one it is given."""
    return Checkpoint(dict(checkpoint.tensors), dict(checkpoint.metadata), checkpoint.path)


def noise_latent(channels: int, latents: int, height: int, width: int) -> Tensor:
    """Seeded normal latent [1, C, T, h, w]."""
    return torch.randn(1, channels, latents, height, width, generator=torch.Generator().manual_seed(1))


def noise_video(frames: int, height: int, width: int) -> Tensor:
    """Seeded smooth colours with a little noise, [F, H, W, 3] in 0..1."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(1, 3, max(2, frames // 8), max(2, height // 64), max(2, width // 64), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (frames, height, width), mode="trilinear", align_corners=True)
    video = smooth[0].permute(1, 2, 3, 0).contiguous()
    return video.add_(0.05 * torch.randn(video.shape, generator=generator)).clamp_(0, 1)


def check_size(size: str, spatial: int) -> tuple[int, int]:
    """WIDTHxHEIGHT -> (width, height), both multiples of `spatial`. Raises InputError."""
    try:
        width, height = map(int, size.lower().split("x"))
    except ValueError:
        raise InputError(f"size {size!r}: write WIDTHxHEIGHT, such as 1280x720") from None
    if min(width, height) < spatial or width % spatial or height % spatial:
        raise InputError(f"size {size}: width and height must be multiples of {spatial}")
    return width, height
