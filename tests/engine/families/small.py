"""A small network of each family, with random weights."""

from __future__ import annotations

from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import (
    ARCHITECTURES,
    cogvideox,
    cosmos,
    hunyuan,
    hunyuan15,
    hunyuan_image,
    hunyuan_refiner,
    kl,
    ltx,
    ltx_diffusion,
    mage,
    minimax_h3,
    mochi,
    qwen_image21,
    seedvr2,
    svd,
    tae,
    taehv,
    wan,
)
from zerowaste_vae.engine.families.ltx_diffusion.diffusion import NeighbourDecoder, Stage

WIDTHS, LEVEL, BLOCK = (16, 16, 16, 16), mochi.Level, ltx.Block
LEVELS = (LEVEL(32, 1), LEVEL(32, 2, (1, 2, 2), True), LEVEL(32, 2, (2, 2, 2)), LEVEL(32, 2, (3, 2, 2)), LEVEL(32, 1))
# Their keys are those that the published one is known by.
DEEP = (LEVEL(32, 2), LEVEL(32, 4, (3, 2, 2)), LEVEL(32, 4, (2, 2, 2)), LEVEL(32, 2, (1, 2, 2)), LEVEL(32, 2))
BLOCKS = (BLOCK(16, 2, noisy=True), *(BLOCK(16, stride=(2, 2, 2)), BLOCK(16, 2)) * 3)
DIFFUSION = NeighbourDecoder(
    16, 16, tuple(map(Stage, (32, 16, 16, 16), (1,) * 4, ltx_diffusion.KERNELS, ltx_diffusion.STRIDES)), 16, 1,
    ltx_diffusion.LAST_KERNEL, 4, 16,
)  # fmt: skip
SMALL = {
    "seedvr2": seedvr2.Config(None, WIDTHS, norm_groups=4),
    "wan2.1": wan.Config(None, WIDTHS),
    "wan2.2": wan.Config(None, (16, 32, 32, 32), 48, 2),
    "sd": kl.Config(None, WIDTHS, 4, 4, quantised=True, norm_groups=4),
    "flux": kl.Config(WIDTHS, WIDTHS, norm_groups=4),
    "flux2": kl.Config(None, WIDTHS, 32, 32, quantised=True, norm_groups=4),
    "ltx": ltx.Config(None, BLOCKS, 0, 16, latent_channels=16, timestep=0.05),
    "ltx-diffusion": ltx_diffusion.Config(ltx.Config(None, None, latent_channels=16), DIFFUSION),
    "mochi": mochi.Config(LEVELS, DEEP, norm_groups=8),
    "cosmos": cosmos.Config(None, (16, 16, 16)),
    "hunyuanvideo": hunyuan.Config(None, WIDTHS, norm_groups=4),
    "hunyuanvideo1.5": hunyuan15.Config(None, (32,) * 5, 16),
    "hunyuanimage": hunyuan_image.Config(None, (32,) * 6, 16, norm_groups=8),
    "hunyuanimage-refiner": hunyuan_refiner.Config(None, (32,) * 5, 16, norm_groups=8),
    "qwenimage2.1": qwen_image21.Config(None, (16, 16, 32, 32, 32), 16),
    "cogvideox": cogvideox.Config(None, WIDTHS, 4, 1, norm_groups=4),
    "minimaxh3": minimax_h3.Config(None, 64, 3, 96, norm_groups=4),
    "mage": mage.Config(32, 48, 16, 16, 2, 2, 32, 1, 1, norm_groups=4),
    "svd": svd.Config(None, WIDTHS, 4, 4, resnets=(1, 1), norm_groups=4),
    "taesd": tae.Config(None, (8, 8, 12, 16)),
    "taef2": tae.Config(None, (8, 8, 12, 16), 32, pooled=True),
    "taesana": tae.Config(None, (8, 8, 8, 8, 12, 16), deep=True),
    "taehv": taehv.Config(None, (8, 8, 12, 16)),
}
#: Of some families with both halves.
WHOLE = {"wan2.1": wan.Config(WIDTHS, WIDTHS), "flux": SMALL["flux"]}


def small(name: str) -> Checkpoint:
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    return random_checkpoint(SMALL[name], architecture=architecture)
