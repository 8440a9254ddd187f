"""The VAE of HunyuanImage's refiner: HunyuanVideo 1.5's network with group norms, zeros before a clip and no special
first frame. A picture is encoded as four frames, and the last of the four decoded frames is shown."""

from __future__ import annotations

from dataclasses import dataclass

from ..network.architecture import Architecture, KeySet, Published, Shapes, Sizes, groups_of
from ..network.ops.conv import Conv
from ..network.ops.ends import Moments, Pixels
from ..network.ops.norm import Group
from ..network.ops.pictures import EachPicture
from ..network.ops.resnet import Names, Res
from ..network.ops.shortcut import ShortcutDown, ShortcutUp
from ..network.program import STEP, TILES, Program
from .hunyuan import UNUSED, middle
from .hunyuan15 import sizes

NAMES = Names(conv_shortcut="nin_shortcut")
#: Frames that represent one picture.
FRAMES = 4


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of both networks."""

    latent_channels: int = 32

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` None means 32 if it divides all widths."""
        *widths, latent = sizes(shapes, "")
        return cls(*widths, latent, groups_of(norm_groups, *widths))


def decoder(config: Config) -> Program:
    w, norm, steps = config.decoder_widths[::-1], Group(config.norm_groups, "clip"), []
    for i in range(5):
        steps += [Res(f"up.{i}.block.{j}", w[i], w[i], norm, NAMES) for j in range(3)]
        if i < 4:
            steps.append(ShortcutUp(f"up.{i}.upsample", w[i], w[i + 1], temporal=i < 2, lead=False))
    return Program.of(
        "decoder", config.latent_channels, TILES,
        EachPicture("pictures", (
            Conv("conv_in", config.latent_channels, w[0], repeats=True), *middle(w[0], norm, NAMES), *steps,
            Pixels("norm_out", "conv_out", w[4], norm),
        )),
        head="zero", after=1,
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w, norm, steps = config.encoder_widths, Group(config.norm_groups, "clip"), []
    for i in range(5):
        steps += [Res(f"down.{i}.block.{j}", w[i], w[i], norm, NAMES) for j in range(2)]
        if i < 4:
            steps.append(ShortcutDown(f"down.{i}.downsample", w[i], w[i + 1], temporal=i > 1, lead=False))
    return Program.of(
        "encoder", 3,
        EachPicture("pictures", (
            Conv("conv_in", 3, w[0], block=16), *steps, *middle(w[4], norm, NAMES),
            Moments("norm_out", "conv_out", w[4], 2 * config.latent_channels, norm, means=True),
        ), FRAMES), STEP, TILES,
        head="zero", after=1,
    )  # fmt: skip


ARCHITECTURE = Architecture(
    KeySet(
        # The registry tests this after HunyuanImage 2.1's own VAE, which has these names too, and a level more.
        "hunyuanimage-refiner",
        (
            ("decoder.up.0.upsample.conv.weight", "decoder.up.4.block.0.conv1.weight"),
            ("encoder.down.3.downsample.conv.weight", "encoder.down.4.block.0.conv1.weight"),
        ),
    ),
    16, 1, 1.0, Config.from_shapes, encoder, decoder, timed=True,
    published=Published(
        "HunyuanImage refiner", Config((128, 256, 512, 1024, 1024), (128, 256, 512, 1024, 1024)),
        r"hunyuan[ _.-]*image[ _.-]*refiner", ("hunyuanimage",),
    ),
    unused=UNUSED,
)  # fmt: skip
