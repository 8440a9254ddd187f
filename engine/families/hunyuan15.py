"""HunyuanVideo 1.5's video VAE: 16x16 spatial and 4x causal temporal compression into 32 channels. The middle of each
network sees whole clips."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import InputError
from ..network.architecture import (
    Architecture,
    KeySet,
    Published,
    Shapes,
    Sizes,
    Widths,
    both_widths,
    in_either_half,
    latent_of,
)
from ..network.ops.conv import Conv
from ..network.ops.ends import Moments, Pixels
from ..network.ops.norm import Length
from ..network.ops.resnet import Res
from ..network.ops.shortcut import ShortcutDown, ShortcutUp
from ..network.program import STEP, TILES, Program, Step
from .hunyuan import NAMES, UNUSED, middle

#: Number of resolutions, each half of the one before.
LEVELS = 5


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of both networks, whose norms take the length over all channels, without groups."""

    latent_channels: int = 32
    norm_groups: None = None

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` has no meaning here."""
        return cls(*sizes(shapes, ".conv"))


def sizes(shapes: Shapes, conv: str) -> tuple[Widths | None, Widths | None, int]:
    """Return the widths of the encoder and decoder, and the channels of a latent. conv: the ending of a convolution's
    name. Raises InputError."""
    down, up = (f"{row}.{{}}.block.0.conv1{conv}.bias" for row in ("encoder.down", "decoder.up"))
    encoder, decoder = both_widths(shapes, LEVELS, down, up)
    latent = latent_of(shapes, f"conv_in{conv}", f"conv_out{conv}", 32)
    check_shortcuts(encoder, decoder, latent, (4, 4, 8, 8))
    return encoder, decoder, latent


def check_shortcuts(encoder: Widths | None, decoder: Widths | None, latent: int, factors: Iterable[int]) -> None:
    """Refuse widths for which a resampling step, or the latent's end, would repeat or average parts of channels.

    factors: positions that each resampling step joins. Raises InputError."""
    for half, widths, end in (("encoder", encoder, 2 * latent), ("decoder", decoder, latent)):
        if widths is not None and not (widths[-1] % end == 0 and all(
            factor * high % low == 0 and factor * high // low % (factor // 4) == 0 and low % factor == 0
            for (high, low), factor in zip(itertools.pairwise(widths), factors, strict=True)
        )):  # fmt: skip
            raise InputError(f"{half} widths {widths} for {latent} channels do not divide as its shortcuts need")


def decoder(config: Config) -> Program:
    w, norm = config.decoder_widths[::-1], Length()

    def level(i: int) -> list[Step]:
        return [Res(f"up.{i}.block.{j}", w[i], w[i], norm, NAMES) for j in range(3)]

    def up(i: int) -> Step:
        return ShortcutUp(f"up.{i}.upsample", w[i], w[i + 1], temporal=i < 2, conv="conv.conv")

    return Program.of(
        "decoder", config.latent_channels,
        Conv("conv_in.conv", config.latent_channels, w[0], repeats=True), *middle(w[0], norm), TILES,
        *level(0), up(0), STEP,
        *level(1), up(1), STEP,
        *level(2), up(2), STEP,
        *level(3), up(3), STEP,
        *level(4), Pixels("norm_out", "conv_out.conv", w[4], norm),
        border="replicate",
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w, norm = config.encoder_widths, Length()

    def level(i: int) -> list[Step]:
        return [Res(f"down.{i}.block.{j}", w[i], w[i], norm, NAMES) for j in range(2)]

    def down(i: int) -> Step:
        return ShortcutDown(f"down.{i}.downsample", w[i], w[i + 1], temporal=i > 1, conv="conv.conv")

    return Program.of(
        "encoder", 3,
        Conv("conv_in.conv", 3, w[0], block=16), *level(0), down(0), STEP,
        *level(1), down(1),
        *level(2), down(2),
        *level(3), down(3),
        *level(4), TILES,
        *middle(w[4], norm),
        Moments("norm_out", "conv_out.conv", w[4], 2 * config.latent_channels, norm, means=True),
        border="replicate",
    )  # fmt: skip


ARCHITECTURE = Architecture(
    KeySet("hunyuanvideo1.5", in_either_half("mid.attn_1.norm.gamma", "mid.block_1.norm1.gamma")),
    16, 4, 1.0, Config.from_shapes, encoder, decoder,
    published=Published(
        "HunyuanVideo 1.5", Config((128, 256, 512, 1024, 1024), (128, 256, 512, 1024, 1024)),
        r"hunyuan[ _.-]*video[ _.-]*1?[._]?5", ("hunyuan",),
    ),
    unused=UNUSED,
)  # fmt: skip
