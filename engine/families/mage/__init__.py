"""Mage-VAE: 16x16 pixels into 128 channels. Blocks with means over the whole picture work at the latents' size; a small
network makes every pixel of a patch from its position alone. Every latent is a separate picture."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...network.architecture import (
    DEFAULT_GROUPS,
    Architecture,
    Draws,
    KeySet,
    Published,
    Shapes,
    Widths,
    groups_of,
    length,
    rows,
)
from ...network.ops.conv import Conv
from ...network.ops.norm import Group
from ...network.ops.resnet import Res
from ...network.program import STEP, TILES, Program
from ..kl import NAMES, PARTS
from .mixing import Mix
from .patchwise import Fuse, LayerMoments, PatchEmbed, PatchPixels, Twice
from .windows import WindowAttention

#: Pixels of a latent's side, and positions of an attention window's.
PATCH, WINDOW = 16, 32
_FIRST = "y_embedder.decoder"


@dataclass(frozen=True)
class Config:
    """Sizes of both networks.

    Attributes:
        hidden: channels of the decoder's blocks; 0: the file has no decoder.
        head: channels of the encoder's first blocks; 0: the file has no encoder.
        features: values of a pixel.
        encoder_hidden: channels of the encoder's later blocks.
    """

    hidden: int
    head: int
    features: int = 32
    latent_channels: int = 128
    blocks: int = 21
    pixel_blocks: int = 3
    encoder_hidden: int = 384
    encoder_blocks: int = 21
    head_blocks: int = 2
    norm_groups: int = DEFAULT_GROUPS

    @property
    def decoder_widths(self) -> Widths | None:
        return (self.hidden, self.features) if self.hidden else None

    @property
    def encoder_widths(self) -> Widths | None:
        return (self.head, self.encoder_hidden) if self.head else None

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks."""
        hidden = length(shapes, f"decoder.{_FIRST}.conv_in.bias")
        head = length(shapes, "encoder.patch_cond_embed.bias")
        latent = length(shapes, "encoder.proj_out.bias", 256) // 2
        if hidden and len(shape := shapes.get(f"decoder.{_FIRST}.conv_in.weight", ())) > 1:
            latent = shape[1]
        return cls(
            hidden, head, length(shapes, "decoder.dec_net.input_proj.bias", 32), latent,
            rows(shapes, "decoder.blocks"), rows(shapes, "decoder.dec_net.res_blocks"),
            length(shapes, "encoder.proj_down.bias", 384), rows(shapes, "encoder.blocks"),
            rows(shapes, "encoder.head_blocks"), groups_of(norm_groups, (hidden,)),
        )  # fmt: skip


def decoder(config: Config) -> Program:
    w, norm = config.hidden, Group(config.norm_groups)

    def res(i: int) -> Res:
        return Res(f"{_FIRST}.block.{i}", w, w, norm, NAMES)

    def attention(i: int) -> WindowAttention:
        return WindowAttention(f"{_FIRST}.block.{i}", w, norm, parts=PARTS, window=WINDOW)

    return Program.of(
        "decoder", config.latent_channels,
        Conv(f"{_FIRST}.conv_in", config.latent_channels, w), res(0), attention(1), res(2), attention(3), res(4),
        Twice(f"{_FIRST}.norm_out", f"{_FIRST}.conv_out", "s_embedder.proj2", "s_embedder.proj1", w,
              config.latent_channels, PATCH, norm),
        *(Mix(f"blocks.{i}", w, w, "t_embedder", i == 0) for i in range(config.blocks)), TILES,
        PatchPixels(w, config.features, config.pixel_blocks, PATCH),
        taps=1, single=True,
    )  # fmt: skip


def encoder(config: Config) -> Program:
    head, w = config.head, config.encoder_hidden
    return Program.of(
        "encoder", 3,
        PatchEmbed("patch_cond_embed", 3, head, PATCH), STEP, TILES,
        *(Mix(f"head_blocks.{i}", head) for i in range(config.head_blocks)),
        Fuse("proj_down", "z_proj", "fuse_proj", head, w, config.latent_channels),
        *(Mix(f"blocks.{i}", w, 0, "t_embedder", i == 0) for i in range(config.encoder_blocks)),
        LayerMoments("norm_out", "proj_out", w, 2 * config.latent_channels),
        taps=1, single=True,
    )  # fmt: skip


#: Prefixes of both components in published files, and in those that ComfyUI saves.
_HALVES = {"pipeline": "decoder", "decoder_model": "decoder", "student.dconv_encoder": "encoder",
           "dconv_encoder": "encoder"}  # fmt: skip
_PREFIX = re.compile("^(" + "|".join(map(re.escape, _HALVES)) + r")\.")
#: Parts that only training used.
UNUSED = r"(decoder|pipeline|decoder_model)\.y_embedder\.(encoder|bottleneck)\."


def native(names: list[str]) -> dict[str, str | None]:
    """Map a file's names to those of the encoder and decoder."""
    found = {name: _PREFIX.sub(lambda m: f"{_HALVES[m[1]]}.", name) for name in names}
    return {name: None if re.match(UNUSED, new) else new for name, new in found.items()}


_KEYS = {
    "decoder": (f"{_FIRST}.conv_in.weight", "dec_net.cond_embed.weight"),
    "encoder": ("patch_cond_embed.weight", "fuse_proj.weight"),
}
ARCHITECTURE = Architecture(
    KeySet(
        "mage",
        tuple(tuple(f"{prefix}.{name}" for name in _KEYS[half])
              for prefix, half in (_HALVES | {"decoder": "decoder", "encoder": "encoder"}).items()),
        native,
    ),
    PATCH, 1, 1.0, Config.from_shapes, encoder, decoder, native="bf16",
    published=Published("Mage-VAE", Config(384, 768), r"(?<![a-z])mage[ _.-]*(flow|vae)", ("mage",),
                        draws=Draws(matrices=1.0, named=(("final_layer.linear.weight", 0.0, 0.06),))),
    unused=UNUSED,
)  # fmt: skip
