"""Stable Video Diffusion's VAE: Stable Diffusion's encoder, and its decoder with a block of convolutions in time after
each block within frames. Group norms in time span the clip, so a clip is decoded as a whole."""

from __future__ import annotations

import re
from dataclasses import replace

from ...network.architecture import Architecture, KeySet, Published, Shapes
from ...network.ops.ends import Linear, Pixels
from ...network.ops.norm import Group
from ...network.ops.resnet import Res
from ...network.program import Mark, Program, Step
from .. import kl
from .in_time import PARTS, TimePixels, TimeRes

#: The blocks in time have another small number in their norms than the blocks of frames.
EPS = 1e-5
_QUANT = "quant_conv"


class Config(kl.Config):
    """Widths as Stable Diffusion's. quantised: a convolution follows the encoder, as in diffusers' network; ComfyUI's
    has none, and ignores one in a file with the original names."""

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` None means 32 if it divides all widths."""
        found = super().from_shapes(shapes, norm_groups)
        quantised = f"encoder.{_QUANT}.weight" in shapes
        return replace(found, latent_channels=found.z_channels, quantised=quantised)


def encoder(config: Config) -> Program:
    image, both = kl.encoder(replace(config, quantised=False)), 2 * config.z_channels
    return replace(image, items=(*image.items, Linear(_QUANT, both, both))) if config.quantised else image


def decoder(config: Config) -> Program:
    image, steps = kl.decoder(replace(config, quantised=False)), list[Step | Mark]()
    for step in image.items:
        if isinstance(step, Pixels):
            step = TimePixels(step.norm_name, step.name, step.c_in, step.norm)
        steps.append(step)
        if isinstance(step, Res):
            norm = Group(config.norm_groups, "clip", EPS)
            steps.append(TimeRes(f"{step.name}.time_stack", f"{step.name}.mix_factor", step.c_out, norm))
    return replace(image, items=tuple(steps))


# -- names ------------------------------------------------------------------------------------------------------------

_BLOCK = r"(.*\.resnets\.\d+)"
_PARTS = dict(zip(("norm1", "conv1", "norm2", "conv2"), PARTS, strict=True))


def _original(names: list[str]) -> dict[str, str | None]:
    """Map diffusers' names to the original ones."""

    def flat(name: str) -> str:
        name = re.sub(rf"{_BLOCK}\.spatial_res_block\.", r"\1.", name)
        name = re.sub(rf"{_BLOCK}\.time_mixer\.mix_factor$", r"\1.mix_factor", name)
        if m := re.fullmatch(rf"{_BLOCK}\.temporal_res_block\.(\w+)\.(\w+)", name):
            name = f"{m[1]}.time_stack.{_PARTS.get(m[2], m[2])}.{m[3]}"
        name = re.sub(rf"^{_QUANT}\.", f"encoder.{_QUANT}.", name)
        return name.replace("decoder.time_conv_out.", "decoder.conv_out.time_mix_conv.")

    flattened = {name: flat(name) for name in names}
    mapped = kl.original(list(flattened.values()))
    return {name: mapped[one] for name, one in flattened.items()}


DIFFUSERS = KeySet(
    "svd-diffusers",
    (("decoder.up_blocks.0.resnets.0.spatial_res_block.conv1.weight", "decoder.time_conv_out.weight"),),
    _original,
)
_WIDTHS = (128, 256, 512, 512)
ARCHITECTURE = Architecture(
    KeySet("svd", (("decoder.mid.block_1.mix_factor", "decoder.mid.block_1.time_stack.in_layers.0.weight"),)),
    8, 1, 1.0, Config.from_shapes, encoder, decoder, native="bf16", sized=kl.SD.sized, joined=True,
    published=Published(
        "Stable Video Diffusion", Config(_WIDTHS, _WIDTHS, 4, 4), r"svd|stable[ _.-]*video[ _.-]*diffusion",
        ("stable video diffusion", "svd"),
    ),
    unused=r"(post_)?quant_conv\.",  # under the original names, as ComfyUI
)  # fmt: skip
