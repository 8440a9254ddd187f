"""HunyuanImage 2.1's VAE: 32x32 pixels into 64 channels. Every latent is a separate picture."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..errors import InputError
from ..network.ops.attention import Attention
from ..network.ops.conv import Conv
from ..network.ops.ends import Moments, Pixels
from ..network.ops.norm import Group
from ..network.ops.resnet import Res
from ..network.ops.shortcut import ShortcutDown, ShortcutUp
from ..network.program import STEP, TILES, Program, Step
from .arch import (
    DEFAULT_GROUPS,
    Architecture,
    KeySet,
    Published,
    Shapes,
    Widths,
    groups_of,
    length,
    level_widths,
)  # fmt: skip
from .kl import NAMES, PARTS

#: Number of resolutions, each half of the one before.
LEVELS = 6


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution, e.g. (128, 256, 512, 512, 1024, 1024). None: that component is absent."""

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 64
    norm_groups: int = DEFAULT_GROUPS

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks. Raises InputError for sizes that its shortcuts cannot have."""
        encoder = level_widths(shapes, [f"encoder.down.{i}.block.0.conv1.bias" for i in range(LEVELS)])
        decoder = level_widths(shapes, [f"decoder.up.{LEVELS - 1 - i}.block.0.conv1.bias" for i in range(LEVELS)])
        latent = length(shapes, "encoder.conv_out.bias", 128) // 2
        if decoder and len(shape := shapes.get("decoder.conv_in.weight", ())) > 1:
            latent = shape[1]
        for half, widths, end in (("encoder", encoder, 2 * latent), ("decoder", decoder, latent)):
            if widths is not None and not _shortcuts_fit(widths, end):
                raise InputError(f"{half} widths {widths} for {latent} channels do not divide as its shortcuts need")
        return cls(encoder, decoder, latent, groups_of([*(encoder or ()), *(decoder or ())], norm_groups))


def _shortcuts_fit(widths: Widths, end: int) -> bool:
    """Return True if all resampling steps, and the latent's end, repeat or average whole channels."""
    pairs = itertools.pairwise(widths)
    return widths[-1] % end == 0 and all(4 * high % low == 0 and low % 4 == 0 for high, low in pairs)


def _middle(width: int, norm: Group) -> list[Step]:
    return [
        Res("mid.block_1", width, width, norm, NAMES),
        Attention("mid.attn_1", width, norm, parts=PARTS),
        Res("mid.block_2", width, width, norm, NAMES),
    ]


def decoder(config: Config) -> Program:
    w, norm = config.decoder_widths[::-1], Group(config.norm_groups)

    def level(i: int) -> list[Step]:
        steps: list[Step] = [Res(f"up.{i}.block.{j}", w[i], w[i], norm, NAMES) for j in range(3)]
        return steps if i == LEVELS - 1 else [*steps, ShortcutUp(f"up.{i}.upsample", w[i], w[i + 1], temporal=False)]

    return Program.of(
        "decoder", config.latent_channels,
        Conv("conv_in", config.latent_channels, w[0], repeats=True), *_middle(w[0], norm), TILES,
        *itertools.chain(*map(level, range(LEVELS))), Pixels("norm_out", "conv_out", w[-1], norm),
        taps=1, single=True,
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w, norm = config.encoder_widths, Group(config.norm_groups)

    def level(i: int) -> list[Step]:
        steps: list[Step] = [Res(f"down.{i}.block.{j}", w[i], w[i], norm, NAMES) for j in range(2)]
        last = i == LEVELS - 1
        return steps if last else [*steps, ShortcutDown(f"down.{i}.downsample", w[i], w[i + 1], temporal=False)]

    return Program.of(
        "encoder", 3,
        Conv("conv_in", 3, w[0], block=2 ** (LEVELS - 1)), *level(0), STEP,
        *itertools.chain(*map(level, range(1, LEVELS - 1))), TILES,
        *level(LEVELS - 1), *_middle(w[-1], norm),
        Moments("norm_out", "conv_out", w[-1], 2 * config.latent_channels, norm, means=True),
        taps=1, single=True,
    )  # fmt: skip


_WIDTHS = (128, 256, 512, 512, 1024, 1024)
ARCHITECTURE = Architecture(
    KeySet("hunyuanimage", tuple(
        tuple(f"{row}.5.block.{i}.conv1.weight" for i in (0, 1)) for row in ("decoder.up", "encoder.down")
    )),
    32, 1, 1.0, Config.from_shapes, encoder, decoder,
    published=Published(
        "HunyuanImage 2.1", Config(_WIDTHS, _WIDTHS), r"hunyuan[ _.-]*image(?!.*refiner)", ("hunyuan",),
    ),
)  # fmt: skip
