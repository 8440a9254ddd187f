"""Cosmos' tokenizer CV8x8x8: 8x8 pixels and 8 frames into 16 channels, causal, with wavelets for 4x4x4 of that."""

from __future__ import annotations

from dataclasses import dataclass

from ...network.architecture import Architecture, KeySet, Published, Shapes, both_widths, length
from ...network.ops.attention import SpaceAttention, TimeAttention
from ...network.ops.ends import Pointwise
from ...network.ops.norm import Group
from ...network.ops.resnet import Names
from ...network.ops.statistics import ByFrame
from ...network.program import STEP, TILES, Program, Step
from .factorised import Conv, MeanDown, MeanUp, Moments, Res, WaveletPatches, WaveletPixels

NAMES = Names("norm1.norm", "conv1", "norm2.norm", "conv2", "nin_shortcut.conv3d")
NORM = Group(1)
PATCH, PERIOD = 4, 16
#: Factor of the latents that samplers have.
SCALE = 0.5
#: From full to lowest resolution.
Three = tuple[int, int, int]


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution, e.g. (256, 512, 512). None: that component is absent from the file.
    enters: channels after the encoder's first convolution."""

    encoder_widths: Three | None
    decoder_widths: Three | None
    enters: int = 128
    latent_channels: int = 16
    norm_groups: None = None

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` has no meaning here."""
        down, up = (f"{row}.{{}}.block.0.conv1.0.conv3d.bias" for row in ("encoder.down", "decoder.up"))
        latent = length(shapes, "post_quant_conv.conv3d.bias", length(shapes, "quant_conv.conv3d.bias", 16))
        enters = length(shapes, "encoder.conv_in.0.conv3d.bias", 128)
        return cls(*both_widths(shapes, 3, down, up, upward=False), enters, latent)


def decoder(config: Config) -> Program:
    high, mid, low = config.decoder_widths
    latent = config.latent_channels

    def level(i: int, c_in: int, width: int) -> list[Step]:
        return [Res(f"up.{i}.block.{j}", c_in if j == 0 else width, width, NORM, NAMES) for j in range(3)]

    return Program.of(
        "decoder", latent,
        ByFrame("/latent_mean", "/latent_std", latent, PERIOD, SCALE),
        Pointwise("/post_quant_conv", latent, latent, layer="conv3d"),
        Conv("conv_in", latent, low), *_middle(low), *level(2, low, low), *level(1, low, mid), TILES,
        MeanUp("up.1.upsample", mid), STEP,
        *level(0, mid, high), WaveletPixels("norm_out.norm", "conv_out", high, NORM, PATCH, "unpatcher3d"),
        single=True,
    )  # fmt: skip


def encoder(config: Config) -> Program:
    high, mid, low = config.encoder_widths
    latent = config.latent_channels

    def level(i: int, c_in: int, width: int) -> list[Step]:
        return [Res(f"down.{i}.block.{j}", c_in if j == 0 else width, width, NORM, NAMES) for j in range(2)]

    return Program.of(
        "encoder", 3,
        WaveletPatches("patcher3d", 8, PATCH), Conv("conv_in", 3 * PATCH**3, config.enters),
        *level(0, config.enters, high), STEP,
        MeanDown("down.0.downsample", high), TILES,
        *level(1, high, mid), *level(2, mid, low), *_middle(low),
        Moments("norm_out.norm", "conv_out", low, latent, NORM),
        Pointwise("/quant_conv", latent, latent, layer="conv3d"),
        ByFrame("/latent_mean", "/latent_std", latent, PERIOD, SCALE, leaves=True),
        single=True,
    )  # fmt: skip


def _middle(width: int) -> list[Step]:
    return [
        Res("mid.block_1", width, width, NORM, NAMES),
        SpaceAttention("mid.attn_1.0", width, NORM),
        TimeAttention("mid.attn_1.1", width, NORM),
        Res("mid.block_2", width, width, NORM, NAMES),
    ]


ARCHITECTURE = Architecture(
    KeySet(
        "cosmos",
        (
            ("decoder.unpatcher3d.wavelets", "decoder.mid.attn_1.1.q.conv3d.weight"),
            ("encoder.patcher3d.wavelets", "encoder.mid.attn_1.1.q.conv3d.weight"),
            # ComfyUI's own VAE objects have no constants among their weights.
            ("decoder.mid.attn_1.1.proj_out.conv3d.weight", "decoder.mid.attn_1.1.q.conv3d.weight"),
            ("encoder.mid.attn_1.1.proj_out.conv3d.weight", "encoder.mid.attn_1.1.q.conv3d.weight"),
        ),
    ),
    8, 8, 1.0, Config.from_shapes, encoder, decoder, native="bf16",
    constants=tuple((n, (0.5**0.5,) * 2) for n in ("decoder.unpatcher3d.wavelets", "encoder.patcher3d.wavelets")),
    published=Published("Cosmos CV8x8x8", Config((256, 512, 512), (256, 512, 512)), r"cosmos", ("cosmos",)),
    unused=r"(encoder\.|decoder\.un)patcher3d\.(_arange|patch_size_buffer)$",  # constants
)  # fmt: skip
