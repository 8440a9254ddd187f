"""SeedVR2's video VAE (`video_vae_v3`): 8x8 spatial and 4x causal temporal compression into 16 channels."""

from __future__ import annotations

from dataclasses import replace

from ..network.architecture import Architecture, KeySet, Published, Shapes, Sizes, both_widths, groups_of, latent_of
from ..network.ops.attention import Attention
from ..network.ops.conv import Conv
from ..network.ops.down import StridedDown
from ..network.ops.ends import Moments, Pixels
from ..network.ops.norm import Group
from ..network.ops.resnet import Res
from ..network.ops.up import ShuffleUp
from ..network.program import STEP, TILES, Program, Step


class Config(Sizes):
    """Sizes of both networks."""

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` None means 32 if it divides all widths."""
        down, up = (f"{row}.{{}}.resnets.0.conv1.bias" for row in ("encoder.down_blocks", "decoder.up_blocks"))
        widths = both_widths(shapes, 4, down, up)
        return cls(*widths, latent_of(shapes, "conv_in", "conv_out", 16), groups_of(norm_groups, *widths))


def decoder(config: Config) -> Program:
    w, norm = config.decoder_widths[::-1], Group(config.norm_groups)

    def level(i: int) -> list[Step]:
        ins = (w[max(i - 1, 0)], w[i], w[i])
        return [Res(f"up_blocks.{i}.resnets.{j}", c, w[i], norm) for j, c in enumerate(ins)]

    def up(i: int) -> Step:
        return ShuffleUp(f"up_blocks.{i}.upsamplers.0", w[i], temporal=i < 2)

    return Program.of(
        "decoder", config.latent_channels,
        Conv("conv_in", config.latent_channels, w[0]), *_middle(w[0], norm), *level(0), TILES,
        up(0), *level(1), STEP,
        up(1), *level(2), STEP,
        up(2), *level(3), Pixels("conv_norm_out", "conv_out", w[3], norm),
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w, norm = config.encoder_widths, Group(config.norm_groups)

    def level(i: int) -> list[Step]:
        return [Res(f"down_blocks.{i}.resnets.{j}", c, w[i], norm) for j, c in enumerate((w[max(i - 1, 0)], w[i]))]

    def down(i: int) -> Step:
        return StridedDown(f"down_blocks.{i}.downsamplers.0", w[i], temporal=i > 0)

    return Program.of(
        "encoder", 3,
        Conv("conv_in", 3, w[0]), *level(0), down(0), STEP,
        *level(1), down(1),
        *level(2), down(2), TILES,
        *level(3), *_middle(w[3], norm), Moments("conv_norm_out", "conv_out", w[3], 2 * config.latent_channels, norm),
    )  # fmt: skip


def _middle(width: int, norm: Group) -> list[Step]:
    return [
        Res("mid_block.resnets.0", width, width, norm),
        Attention("mid_block.attentions.0", width, norm),
        Res("mid_block.resnets.1", width, width, norm),
    ]


#: Names of an attention's parts in old diffusers files.
_OLD = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def _native(names: list[str]) -> dict[str, str | None]:
    """Map old attention names to the new ones; all other names are the same in both layouts."""
    renamed: dict[str, str | None] = {}
    for name in names:
        new = name
        for old, part in _OLD.items():
            new = new.replace(f".attentions.0.{old}.", f".attentions.0.{part}.")
        renamed[name] = new
    return renamed


KEYS = KeySet(
    "seedvr2", (tuple(f"decoder.up_blocks.{i}.upsamplers.0.upscale_conv.weight" for i in (2, 1)),), _native
)
#: Keys of files without the decoder. Other files that diffusers writes have them, too.
ENCODER_KEYS = replace(KEYS, keys=(tuple(f"encoder.down_blocks.{i}.downsamplers.0.conv.weight" for i in (1, 0)),))
PUBLISHED = Published(
    "SeedVR2", Config((128, 256, 512, 512), (128, 256, 512, 512)), r"seedvr|ema_vae", ("seedvr2",)
)
ARCHITECTURE = Architecture(
    KEYS, 8, 4, 0.9152, Config.from_shapes, encoder, decoder, published=PUBLISHED, crops=False, folded=True,
    several=True,  # the published VAE and the demo VAE
)
