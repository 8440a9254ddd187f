"""Seeded VAEs for GPU tests, made on the GPU: published widths, and the narrowest that the fused kernels take."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from zerowaste_vae import Checkpoint, VideoVAE, load
from zerowaste_vae.engine.families import (
    cogvideox,
    hunyuan,
    hunyuan15,
    kl,
    ltx,
    ltx_diffusion,
    mage,
    minimax_h3,
    mochi,
    qwen_image21,
    seedvr2,
    svd,
    wan,
)
from zerowaste_vae.engine.runtime.kept import KEPT

SEEDVR2, WAN21, WAN22 = (seedvr2.ARCHITECTURE, seedvr2.Config), (wan.WAN21, wan.Config), (wan.WAN22, wan.Config)
#: Name -> (architecture and configuration, arguments of the latter).
MODELS = {
    "seedvr2-tiny": (*SEEDVR2, (16, 32, 64, 64), (16, 32, 64, 64), 16, 8),
    "seedvr2-small": (*SEEDVR2, (32, 64, 128, 128), (32, 64, 128, 128), 16, 8),
    "seedvr2-8-bit": (*SEEDVR2, (16, 16, 32, 32), (16, 16, 32, 32), 16, 4),  # the narrowest that has 8-bit convolutions
    # The narrowest all of whose convolutions have a Winograd form.
    "seedvr2-128": (*SEEDVR2, (128, 128, 128, 128), (128, 128, 128, 128)),
    "hunyuanvideo1.5-128": (hunyuan15.ARCHITECTURE, hunyuan15.Config, None, (128, 128, 128, 128, 128)),
    "seedvr2": (*SEEDVR2, (128, 256, 512, 512), (128, 256, 512, 512)),
    # Wan 2.1 halves a level's width when it upsamples, and kernels take no width below 16.
    "wan2.1-tiny": (*WAN21, (16, 32, 32, 32), (16, 32, 32, 32)),
    "wan2.1": (*WAN21, (96, 192, 384, 384), (96, 192, 384, 384)),
    "wan2.2-tiny": (*WAN22, (16, 32, 64, 64), (16, 32, 64, 64), 48, 2),
    "flux": (kl.FLUX, kl.Config, (128, 256, 512, 512), (128, 256, 512, 512)),
    "ltx": (ltx.ARCHITECTURE, lambda: ltx.ARCHITECTURE.published.config),
    "ltx-diffusion": (ltx_diffusion.ARCHITECTURE, lambda: ltx_diffusion.ARCHITECTURE.published.config),
    "mage": (mage.ARCHITECTURE, lambda: mage.ARCHITECTURE.published.config),
    "mochi": (mochi.ARCHITECTURE, lambda: mochi.Config(None, mochi.ARCHITECTURE.published.config.decoder_levels)),
    **{a.name: (a, lambda a=a: a.published.config) for a in (
        hunyuan.ARCHITECTURE, hunyuan15.ARCHITECTURE, qwen_image21.ARCHITECTURE, cogvideox.ARCHITECTURE)},
    "minimaxh3": (minimax_h3.ARCHITECTURE, lambda: replace(
        minimax_h3.ARCHITECTURE.published.config, encoder_widths=(32, 32, 64, 64, 64, 128), layers=4)),
    "svd-tiny": (svd.ARCHITECTURE, svd.Config, (32, 32, 64, 64), (32, 64, 64, 128), 4, 4),
    "wan2.2": (*WAN22, (160, 320, 640, 640), (256, 512, 1024, 1024), 48, 2),
}


def make(name: str, precision: str) -> VideoVAE:
    """Seeded weights under which activations stay of order one: the same values, rounded to the model's own type of 16
    bit, in every precision. No file, so 8 bit leaves nothing in a cache."""
    architecture, configuration, *arguments = MODELS[name]
    config = configuration(*arguments)
    dtype = torch.float16 if name.startswith(("seedvr2", "minimax")) else torch.bfloat16
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("meta"):
        model = architecture.build(config)
    weights = {}
    for key, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator, device="cuda")
        weights[key] = (_token_weight if name == "minimaxh3" else _weight)(key, noise).to(dtype)
        if name == "minimaxh3":  # its layers may wait in host memory
            weights[key] = weights[key].cpu()
    return load(Checkpoint(weights, described(name, config)), precision, "cuda")


def described(name: str, config: Any) -> dict[str, str]:
    """Return the metadata with which shapes tell this configuration: LTX-2.3's alone tell of another network."""
    groups = {} if config.norm_groups is None else {"norm_num_groups": str(config.norm_groups)}
    return groups | (dict(ltx.ARCHITECTURE.published.metadata) if name == "ltx" else {})


def decibels(frames: torch.Tensor, exact: torch.Tensor) -> float:
    return 10 * math.log10(1 / (frames.double() - exact.double()).square().mean().item())


def reserved() -> int:
    """Give back what may be, begin to count anew, and return the bytes on the GPU that are in use or stay reserved."""
    KEPT.release()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


@contextmanager
def plain_torch(vae: VideoVAE) -> Iterator[None]:
    """Switch the fused kernels off in the block."""
    vae.triton_fusion = False
    try:
        yield
    finally:
        vae.triton_fusion = True


def _weight(key: str, noise: torch.Tensor) -> torch.Tensor:
    norms = key.endswith("weight") and "norm" in key and ".conv_" not in key  # such norms have convolutions
    if norms or key.endswith(("gamma", "_layers.0.weight")):
        return 1 + 0.2 * noise
    return noise * (noise[0].numel() ** -0.5 if noise.ndim > 1 else 0.1)


def _token_weight(key: str, noise: torch.Tensor) -> torch.Tensor:
    """Under which layers of a transformer say something."""
    if key.endswith("tokens") or key == "latents_mean":
        return noise
    if key == "latents_std":
        return 1 + 0.1 * noise.abs()
    if noise.ndim > 1:
        return noise * (1.4 / noise[0].numel()) ** 0.5
    if "scale" in key:
        return 0.5 + 0.1 * noise
    return 1 + 0.1 * noise if "norm" in key and key.endswith("weight") else 0.05 * noise
