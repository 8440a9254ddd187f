"""HunyuanImage 2.1's VAE: 32x32 pixels into 64 channels. Every latent is a separate picture."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..network.architecture import Architecture, KeySet, Published, Shapes, Sizes, both_widths, groups_of, latent_of
from ..network.ops.conv import Conv
from ..network.ops.ends import Moments, Pixels
from ..network.ops.norm import Group
from ..network.ops.resnet import Res
from ..network.ops.shortcut import ShortcutDown, ShortcutUp
from ..network.program import STEP, TILES, Program, Step
from .hunyuan import UNUSED
from .hunyuan15 import check_shortcuts
from .kl import NAMES, middle

#: Number of resolutions, each half of the one before.
LEVELS = 6


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of both networks."""

    latent_channels: int = 64

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks. Raises InputError for sizes that its shortcuts cannot have."""
        down, up = (f"{row}.{{}}.block.0.conv1.bias" for row in ("encoder.down", "decoder.up"))
        widths = both_widths(shapes, LEVELS, down, up)
        latent = latent_of(shapes, "conv_in", "conv_out", 64, axes=4)
        check_shortcuts(*widths, latent, (4,) * (LEVELS - 1))
        return cls(*widths, latent, groups_of(norm_groups, *widths))


def decoder(config: Config) -> Program:
    w, norm = config.decoder_widths[::-1], Group(config.norm_groups)

    def level(i: int) -> list[Step]:
        steps: list[Step] = [Res(f"up.{i}.block.{j}", w[i], w[i], norm, NAMES) for j in range(3)]
        return steps if i == LEVELS - 1 else [*steps, ShortcutUp(f"up.{i}.upsample", w[i], w[i + 1], temporal=False)]

    return Program.of(
        "decoder", config.latent_channels,
        Conv("conv_in", config.latent_channels, w[0], repeats=True), *middle(w[0], norm), TILES,
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
        *level(LEVELS - 1), *middle(w[-1], norm),
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
    unused=UNUSED,
)  # fmt: skip
