"""Weights and inputs of measurements, the same for this pack and every peer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...checkpoints import Checkpoint, read_checkpoint
from ...errors import InputError
from ...families import ARCHITECTURES, DEFAULT, by_words
from ...loader import demo_vae_path
from ...network.architecture import Architecture, Draws

if TYPE_CHECKING:
    from ...vae import VideoVAE

#: The sizes of the published VAE of the first family.
PUBLISHED = DEFAULT.published.config
RANDOM, DEMO = "random", "demo"
#: Endings of parameters that latents are divided by.
SPREADS = ("running_var", "std-of-means")
#: Of random numbers, whatever the process' defaults are.
CPU = {"dtype": torch.float32, "device": "cpu"}


def default_weights(device: torch.device) -> str:
    """Return full width on a GPU, and the demo VAE on a CPU, where full width takes minutes per frame."""
    return RANDOM if device.type == "cuda" else DEMO


#: Families whose published widths can be drawn.
FAMILIES = tuple(a.name for a in ARCHITECTURES if a.published)


def read_weights(weights: str) -> Checkpoint:
    """Return the weights to measure.

    Args:
        weights: "random" (the first family's published widths, seed 0), the name of another family for the same of it,
            "demo", or a file.
    """
    family = DEFAULT if weights == RANDOM else None if Path(weights).is_file() else by_words(weights)
    if family is not None:
        return random_checkpoint(architecture=family)
    return read_checkpoint(demo_vae_path() if weights == DEMO else Path(weights))


def random_checkpoint(
    config: Any = None, seed: int = 0, architecture: Architecture = DEFAULT, device: torch.device | None = None
) -> Checkpoint:  # fmt: skip
    """Return seeded fp16 weights of a family's network, drawn by its `Draws`.

    Time and memory are those of real weights.

    Args:
        config: sizes of the network; None for the published ones.
        seed: of the random numbers.
        architecture: the family.
        device: where they are drawn (None: a CPU); the values are other ones on each kind of device.
    """
    published = architecture.published
    config = config or published.config
    with torch.device("meta"):
        state = architecture.build(config).state_dict()
    where = device or torch.device("cpu")
    generator, draws = torch.Generator(where).manual_seed(seed), published.draws
    one_or_all = {name: values if len(values) > 1 else values[0] for name, values in draws.fixed}
    fixed = {name: torch.tensor(value, dtype=torch.float32, device="cpu") for name, value in one_or_all.items()}
    tensors = {name: values.expand(state[name].shape).contiguous() for name, values in fixed.items()}
    for name in sorted(state.keys() - tensors):
        drawn = torch.randn(state[name].shape, generator=generator, dtype=torch.float32, device=where)
        tensors[name] = _drawn(name, drawn, draws).half()
    metadata = {} if config.norm_groups is None else {"norm_num_groups": str(config.norm_groups)}
    return Checkpoint(tensors, metadata | dict(published.metadata if config == published.config else {}))


def _drawn(name: str, draw: Tensor, draws: Draws) -> Tensor:
    """Return a parameter's values, made from normally distributed ones."""
    for end, mean, deviation in draws.named:
        if name.endswith(end):
            return mean + deviation * draw
    if name.endswith("gamma") or (draw.ndim == 1 and name.endswith("weight")):
        return 1 + draws.norms * draw
    if draw.ndim >= 2:
        return draw * (draws.matrices / draw[0].numel() ** 0.5)
    return 0.5 + 0.5 * draw.abs() if name.endswith(SPREADS) else draws.vectors * draw


def copy_of(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same tensors in a new Checkpoint, because `load` uses up the one it is given."""
    return Checkpoint(dict(checkpoint.tensors), dict(checkpoint.metadata), checkpoint.path)


def seeded_input(vae: VideoVAE, half: str, frames: int, width: int, height: int) -> Tensor:
    """Return what a VAE decodes to, or encodes from, so many frames of width x height pixels.

    Args:
        vae: the VAE.
        half: "decoder" for latents as the host scales them (one a picture for an image VAE), "encoder" for frames.
        frames, width, height: of the clip; a multiple of what a latent decodes to.
    """
    if half == "encoder":
        return noise_video(frames, height, width)
    a = vae.architecture
    scale = a.spatial * a.side
    latent = noise_latent(vae.latent_channels, a.latents(frames), height // scale, width // scale)
    return latent.transpose(0, 2) if a.still else latent


def noise_latent(channels: int, latents: int, height: int, width: int) -> Tensor:
    """Return a seeded normal latent [1, C, T, h, w]."""
    return torch.randn(1, channels, latents, height, width, generator=torch.Generator().manual_seed(1), **CPU)


def noise_video(frames: int, height: int, width: int) -> Tensor:
    """Return seeded smooth colours with a little noise, [F, H, W, 3] in 0..1."""
    generator = torch.Generator().manual_seed(1)
    coarse = max(2, frames // 8), max(2, height // 64), max(2, width // 64)
    coarse = torch.rand(1, 3, *coarse, generator=generator, **CPU)
    smooth = torch.nn.functional.interpolate(coarse, (frames, height, width), mode="trilinear", align_corners=True)
    video = smooth[0].permute(1, 2, 3, 0).contiguous()
    return video.add_(0.05 * torch.randn(video.shape, generator=generator, **CPU)).clamp_(0, 1)


def check_size(size: str, spatial: int) -> tuple[int, int]:
    """Parse WIDTHxHEIGHT into (width, height), both multiples of `spatial`. Raises InputError."""
    try:
        width, height = map(int, size.lower().split("x"))
    except ValueError:
        raise InputError(f"size {size!r}: write WIDTHxHEIGHT, such as 1280x720") from None
    if min(width, height) < spatial or width % spatial or height % spatial:
        raise InputError(f"size {size}: width and height must be multiples of {spatial}")
    return width, height
