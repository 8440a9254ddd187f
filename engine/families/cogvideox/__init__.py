"""CogVideoX's VAE: 8x8 spatial and 4x causal temporal compression into 16 channels. The decoder's norms are scaled and
shifted by the latent, position by position. Norms span the frames of a piece, which is part of the model: up to the
last doubling of the frame rate the decoder takes a clip at once and then 4 frames at a time; the encoder takes 8 frames
at a time, after the rest of the clip's length by 8. Such are ComfyUI's numbers; diffusers' are other ones
(`AsDiffusers`)."""

from __future__ import annotations

from dataclasses import dataclass

from ...network.architecture import (
    DEFAULT_GROUPS,
    Architecture,
    KeySet,
    Published,
    Shapes,
    Widths,
    both_widths,
    groups_of,
    length,
    rows,
)
from ...network.ops.conv import Conv
from ...network.ops.down import StridedDown
from ...network.ops.ends import Moments, Pixels
from ...network.ops.norm import Group
from ...network.ops.resnet import Names, Res
from ...network.ops.up import NearestUp
from ...network.program import STEP, TILES, Mark, Program, Step
from .batches import Batches
from .pairs import DoubledFrames, MeanFrames
from .spatial import LatentConv, Spatial

NAMES = Names(conv1="conv1.conv", conv2="conv2.conv")
#: Levels, of which the first two from the latent change the frame rate.
LEVELS, TEMPORAL = 4, 2
#: Frames of the decoder's pieces, latents of the encoder's.
FRAMES, LATENTS = 4, 2
DIRECT = "CogVideoX's decoder was not measured with it"


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution. None: that component is absent from the file. layers: residual blocks of
    an encoder's level; a decoder's has one more."""

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 16
    layers: int = 3
    norm_groups: int = DEFAULT_GROUPS

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` None means 32 if it divides all widths."""
        down, up = (f"{row}.{{}}.resnets.0.conv1.conv.bias" for row in ("encoder.down_blocks", "decoder.up_blocks"))
        widths = both_widths(shapes, LEVELS, down, up)
        first = shapes.get("decoder.conv_in.conv.weight", ())
        latent = first[1] if len(first) == 5 else length(shapes, "encoder.conv_out.conv.bias", 32) // 2
        layers = rows(shapes, "encoder.down_blocks.0.resnets") or rows(shapes, "decoder.up_blocks.0.resnets") - 1
        return cls(*widths, latent, layers, groups_of(norm_groups, *widths))


class AsDiffusers(Config):
    """Sizes of networks with diffusers' numbers: a clip goes through whole networks two latents at a time, where the
    first batch takes an odd one, too."""

    @classmethod
    def of(cls, config: Config) -> AsDiffusers:
        """Return the same sizes."""
        return cls(**vars(config))


def decoder(config: Config) -> Program:
    w, latent = config.decoder_widths[::-1], config.latent_channels

    def norm(rate: int) -> Spatial:
        return Spatial(config.norm_groups, latent, rate)

    def level(i: int, rate: int) -> list[Step]:
        ins = (w[max(i - 1, 0)], *(w[i],) * config.layers)
        return [Res(f"up_blocks.{i}.resnets.{j}", c, w[i], norm(rate), NAMES) for j, c in enumerate(ins)]

    def up(i: int) -> Step:
        return NearestUp(f"up_blocks.{i}.upsamplers.0", w[i], w[i], temporal=False, conv="conv")

    middle = [Res(f"mid_block.resnets.{i}", w[0], w[0], norm(1), NAMES) for i in range(2)]
    items: list[Step | Mark] = [
        TILES, LatentConv("conv_in.conv", latent, w[0]), *middle,
        *level(0, 1), up(0), DoubledFrames("up_blocks.0.frames"),
        # Frames are doubled before their pixels are: fewer values wait for the pieces.
        *level(1, 2), DoubledFrames("up_blocks.1.frames"), STEP,
        up(1), *level(2, 4), up(2), *level(3, 4), Pixels("norm_out", "conv_out.conv", w[3], norm(4)),
    ]  # fmt: skip
    if isinstance(config, AsDiffusers):
        return Program.of("decoder", latent, TILES, _batches(items, LATENTS), direct=DIRECT)
    return Program.of("decoder", latent, *items, piece=FRAMES, direct=DIRECT)


def _batches(items: list[Step | Mark], count: int) -> Step:
    return Batches("batches", tuple(item for item in items if isinstance(item, Step)), count)


def encoder(config: Config) -> Program:
    w, moments, norm = config.encoder_widths, 2 * config.latent_channels, Group(config.norm_groups, "piece")
    items: list[Step | Mark] = [Conv("conv_in.conv", 3, w[0], block=8)]
    for i in range(LEVELS):
        ins = (w[max(i - 1, 0)], *(w[i],) * (config.layers - 1))
        items += [Res(f"down_blocks.{i}.resnets.{j}", c, w[i], norm, NAMES) for j, c in enumerate(ins)]
        if i < TEMPORAL:
            items.append(MeanFrames(f"down_blocks.{i}.frames"))
        if i < LEVELS - 1:
            items.append(StridedDown(f"down_blocks.{i}.downsamplers.0", w[i], temporal=False, flat=True))
        if i == 0:
            items.append(STEP)
    items += [Res(f"mid_block.resnets.{i}", w[3], w[3], norm, NAMES) for i in range(2)]
    items += [Moments("norm_out", "conv_out.conv", w[3], moments, norm), TILES]
    if isinstance(config, AsDiffusers):
        return Program.of("encoder", 3, _batches(items, 4 * LATENTS), STEP, TILES, forgets=True)
    return Program.of("encoder", 3, *items, piece=LATENTS, forgets=True)


_WIDTHS = (128, 256, 256, 512)
ARCHITECTURE = Architecture(
    KeySet(
        "cogvideox",
        (
            tuple(f"decoder.mid_block.resnets.0.norm1.{part}.weight" for part in ("norm_layer", "conv_y.conv")),
            ("encoder.norm_out.weight", "encoder.down_blocks.0.resnets.0.conv1.conv.weight",
             "encoder.mid_block.resnets.1.conv2.conv.weight"),
        ),
    ),
    8, 4, 1.0, Config.from_shapes, encoder, decoder, native="bf16", fp16=True, pairs=True, in_diffusers=AsDiffusers.of,
    published=Published("CogVideoX", Config(_WIDTHS, _WIDTHS), r"cog[ _.-]*video", ("cogvideox", "cogvideo")),
)  # fmt: skip
