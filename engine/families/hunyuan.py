"""HunyuanVideo's first video VAE, which Kandinsky 5 and SkyReels use too: 8x8 spatial and 4x causal temporal
compression into 16 channels. The middle of each network sees whole clips; the other steps take chunks of two latents,
whose group norms share statistics: chunks of another size would give another result. Such are ComfyUI's numbers;
diffusers' are other ones (`AsDiffusers`)."""

from __future__ import annotations

import sys

from ..network.architecture import (
    Architecture,
    KeySet,
    Published,
    Shapes,
    Sizes,
    both_widths,
    groups_of,
    in_either_half,
    length,
)
from ..network.ops.attention import Attention, EarlierPositions, Parts
from ..network.ops.conv import Conv
from ..network.ops.down import StridedDown
from ..network.ops.ends import Linear, Moments, Pixels
from ..network.ops.norm import Group, Norm
from ..network.ops.resnet import Names, Res
from ..network.ops.up import RepeatUp
from ..network.program import STEP, TILES, Program, Step
from . import kl

#: Every causal convolution is nested in a module of its own.
NAMES = Names(conv1="conv1.conv", conv2="conv2.conv", conv_shortcut="nin_shortcut.conv")
PARTS = Parts("norm", "q", "k", "v", "proj_out", convs=3)
#: Latents per chunk. An encoder's first chunk is only the first frame.
CHUNK = 2
#: Products of a time that these networks do not take, in ComfyUI's class.
UNUSED = r"(en|de)coder\.mid\.block_\d\.temb_proj\."


class Config(Sizes):
    """Sizes of both networks."""

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` None means 32 if it divides all widths."""
        down, up = (f"{row}.{{}}.block.0.conv1.conv.bias" for row in ("encoder.down", "decoder.up"))
        widths = both_widths(shapes, 4, down, up, upward=False)
        latent = length(shapes, "post_quant_conv.bias", length(shapes, "quant_conv.bias", 32) // 2)
        return cls(*widths, latent, groups_of(norm_groups, *widths))


class AsDiffusers(Config):
    """Sizes of networks with diffusers' numbers: norms span a clip, positions attend to no later frame, and an encoder
    halves the frame rate from a clip's first frame on."""

    @classmethod
    def of(cls, config: Config) -> AsDiffusers:
        """Return the same sizes."""
        return cls(config.encoder_widths, config.decoder_widths, config.latent_channels, config.norm_groups)


def decoder(config: Config) -> Program:
    w, latent, whole = config.decoder_widths, config.latent_channels, Group(config.norm_groups, "clip")

    def norm(rate: int) -> Group:
        """Return the norm of a level with `rate` frames per latent; the first latent has only one frame."""
        return Group(config.norm_groups, _spans(config, (CHUNK * rate - rate + 1, CHUNK * rate)))

    def level(i: int, rate: int) -> list[Step]:
        ins = (w[min(i + 1, 3)], w[i], w[i])
        return [Res(f"up.{i}.block.{j}", c, w[i], norm(rate), NAMES) for j, c in enumerate(ins)]

    def up(i: int) -> Step:
        return RepeatUp(f"up.{i}.upsample", w[i], temporal=i < 3, conv="conv.conv")

    return Program.of(
        "decoder", latent,
        Linear("/post_quant_conv", latent), Conv("conv_in.conv", latent, w[3]), *_middle(config, w[3], whole), TILES,
        *level(3, 1), up(3),
        *level(2, 1), up(2),
        *level(1, 2), up(1),
        *level(0, 4), Pixels("norm_out", "conv_out.conv", w[0], norm(4)),
        border="replicate",
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w, moments = config.encoder_widths, 2 * config.latent_channels

    def level(i: int, rate: int) -> list[Step]:
        norm = Group(config.norm_groups, _spans(config, (1, CHUNK * rate)))
        return [Res(f"down.{i}.block.{j}", c, w[i], norm, NAMES) for j, c in enumerate((w[max(i - 1, 0)], w[i]))]

    def down(i: int) -> Step:
        return StridedDown(f"down.{i}.downsample", w[i], temporal=i > 0, centred=True, conv="conv.conv",
                           doubled=not isinstance(config, AsDiffusers))  # fmt: skip

    whole = Group(config.norm_groups, "clip")
    return Program.of(
        "encoder", 3,
        Conv("conv_in.conv", 3, w[0], block=8), *level(0, 4), down(0), STEP,
        *level(1, 4), down(1),
        *level(2, 2), down(2),
        *level(3, 1), TILES,
        *_middle(config, w[3], whole), Moments("norm_out", "conv_out.conv", w[3], moments, whole),
        Linear("/quant_conv", moments),
        border="replicate",
    )  # fmt: skip


def _spans(config: Config, spans: tuple[int, int]) -> tuple[int, int]:
    """Return the frames that norms take together, of a clip's first chunk and of later ones: these, or all."""
    return (sys.maxsize, sys.maxsize) if isinstance(config, AsDiffusers) else spans


def _middle(config: Config, width: int, norm: Norm) -> list[Step]:
    return middle(width, norm, attention=EarlierPositions if isinstance(config, AsDiffusers) else Attention)


def middle(width: int, norm: Norm, names: Names = NAMES, attention: type[Attention] = Attention) -> list[Step]:
    """Return the steps that see a whole clip."""
    return [
        Res("mid.block_1", width, width, norm, names),
        attention("mid.attn_1", width, norm, parts=PARTS, whole=True),
        Res("mid.block_2", width, width, norm, names),
    ]


ARCHITECTURE = Architecture(
    # The registry tests this after the later version, whose files have these keys too.
    KeySet("hunyuanvideo", in_either_half(
        # Audio VAEs have such convolutions, but no attention there.
        "mid.block_1.conv1.conv.weight", "mid.block_1.conv2.conv.weight", "mid.attn_1.q.weight",
    )),
    8, 4, 1.0, Config.from_shapes, encoder, decoder, native="bf16", fp16=True,
    published=Published(
        "HunyuanVideo", Config((128, 256, 512, 512), (128, 256, 512, 512)), r"hunyuan[ _.-]*video",
        ("hunyuan", "kandinsky", "skyreels"),
    ),
    unused=UNUSED, in_diffusers=AsDiffusers.of,
)  # fmt: skip
#: Diffusers' names; they map to the original ones as those of image VAEs do.
DIFFUSERS = KeySet(
    "hunyuanvideo-diffusers",
    in_either_half("mid_block.resnets.0.conv1.conv.weight", "mid_block.attentions.0.to_q.weight",
                   "mid_block.attentions.0.group_norm.weight"),
    kl.original,
)
