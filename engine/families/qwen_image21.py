"""Qwen-Image 2.1's VAE: 16x16 pixels with transparency into 64 channels. It is Wan 2.2's network for a single frame,
with one tap in time. Every latent is a separate picture."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ..errors import InputError
from ..network.architecture import Architecture, KeySet, Published, Shapes, Widths, both_widths, length
from ..network.ops.conv import Conv
from ..network.ops.down import FrameDown
from ..network.ops.ends import Linear, Moments, Pixels
from ..network.ops.norm import Length
from ..network.ops.resnet import Res
from ..network.ops.up import NearestUp
from ..network.program import STEP, TILES, Program, Step
from .wan import NAMES, middle
from .wan.around import Around

#: Number of resolutions, each half of the one before.
LEVELS = 5


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution, e.g. (96, 192, 384, 768, 768). None: that component is absent from the
    file. encoder_colours, decoder_colours: channels of an input and an output pixel."""

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 64
    encoder_colours: int = 4
    decoder_colours: int = 4
    #: Norms take the length over all channels, without groups.
    norm_groups: None = None

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` has no meaning here. Raises InputError for networks
        under the same names that compute something else."""
        timed = next((n for n, s in shapes.items() if n.endswith(".weight") and len(s) == 5 and s[2] != 1), None)
        if timed is not None:
            raise InputError(f"{timed} is a convolution in time, {list(shapes[timed])}: Qwen-Image 2.1's VAE has none")
        down, up = (f"{half}.{row}.{{}}.{row}.0.residual.2.bias"
                    for half, row in (("encoder", "downsamples"), ("decoder", "upsamples")))  # fmt: skip
        encoder, decoder = both_widths(shapes, LEVELS, down, up)
        for half, widths in (("encoder", encoder), ("decoder", decoder)):
            if widths is not None and any(low % high for high, low in itertools.pairwise(widths)):
                raise InputError(f"{half} widths {widths} do not divide each other, as its shortcuts need")
        if encoder is not None and encoder[-1] != encoder[-2]:
            raise InputError(f"encoder widths {encoder}: the last two have to be equal, as its shortcuts need")
        colours = {"encoder.conv1.weight": 4, "decoder.head.2.bias": length(shapes, "decoder.head.2.bias", 4)}
        if encoder and "encoder.conv1.weight" in shapes:
            colours["encoder.conv1.weight"] = math.prod(shapes["encoder.conv1.weight"]) // (9 * encoder[0])
        for name, number in colours.items():
            if number < 3:
                raise InputError(f"{name} is for {number} colour channels; only networks of 3 and more are run")
        latent = length(shapes, "conv2.bias") if decoder else length(shapes, "conv1.bias", 128) // 2
        return cls(encoder, decoder, latent or 64, *colours.values())


def decoder(config: Config) -> Program:
    w, latent = config.decoder_widths[::-1], config.latent_channels

    def level(i: int) -> list[Step]:
        place, ins = f"upsamples.{i}", (w[max(i - 1, 0)], w[i], w[i])
        steps: list[Step] = [Res(f"{place}.upsamples.{j}", c, w[i], Length(), NAMES) for j, c in enumerate(ins)]
        if i == LEVELS - 1:
            return steps
        up = NearestUp(f"{place}.upsamples.3", w[i], w[i], temporal=False)
        return [Around(place, (*steps, up), paired=i < LEVELS - 2)]

    return Program.of(
        "decoder", latent,
        Linear("/conv2", latent), Conv("conv1", latent, w[0]), *middle(w[0]), TILES,
        *itertools.chain(*map(level, range(LEVELS))),
        Pixels("head.0", "head.2", w[-1], Length(), colours=config.decoder_colours),
        taps=1, single=True,
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w, latent = config.encoder_widths, config.latent_channels

    def level(i: int) -> Step:
        place, ins = f"downsamples.{i}", (w[max(i - 1, 0)], w[i])
        steps: list[Step] = [Res(f"{place}.downsamples.{j}", c, w[i], Length(), NAMES) for j, c in enumerate(ins)]
        if i < LEVELS - 1:
            steps.append(FrameDown(f"{place}.downsamples.2", w[i], temporal=False))
        return Around(place, tuple(steps), paired=0 < i < LEVELS - 1)

    return Program.of(
        "encoder", config.encoder_colours,
        Conv("conv1", config.encoder_colours, w[0], block=2 ** (LEVELS - 1)), level(0), STEP,
        *map(level, range(1, LEVELS - 1)), TILES,
        level(LEVELS - 1), *middle(w[-1]),
        Moments("head.0", "head.2", w[-1], 2 * latent, Length()), Linear("/conv1", 2 * latent),
        taps=1, single=True,
    )  # fmt: skip


ARCHITECTURE = Architecture(
    # Wan 2.2's names with a level more.
    KeySet("qwenimage2.1", tuple(
        tuple(f"{row}.4.{row.partition('.')[2]}.{i}.residual.2.weight" for i in (0, 1))
        for row in ("decoder.upsamples", "encoder.downsamples")
    )),
    16, 1, 1.0, Config.from_shapes, encoder, decoder, native="bf16",
    published=Published(
        "Qwen-Image 2.1", Config((96, 192, 384, 768, 768), (144, 288, 576, 1152, 1152)),
        r"qwen[ _.-]*image[ _.-]*2[._]?1(?!\d)", ("qwen",),
    ),
    # Convolutions between frames.
    unused=r"(encoder\.down|decoder\.up)samples\.\d\.(up|down)samples\.\d\.time_conv\.",
)  # fmt: skip
