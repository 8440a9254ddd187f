"""MiniMax H3's video VAE: 16x16 pixels and four frames into 24 channels, by a causal convolution network; back by a
transformer. Both process tiles of sections of a clip, which are part of the model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ...errors import InputError
from ...network.architecture import (
    DEFAULT_GROUPS,
    Architecture,
    Draws,
    KeySet,
    Prunable,
    Published,
    Shapes,
    Widths,
    groups_of,
    length,
    pruned_blocks,
    rows,
)
from ...network.ops.conv import Conv
from ...network.ops.down import StridedDown
from ...network.ops.ends import Linear, Moments
from ...network.ops.norm import Group
from ...network.ops.resnet import Names, residual
from ...network.ops.statistics import Standardise
from ...network.program import STEP, TILES, Program, Step
from ...network.values import Style
from . import names as minimax_h3_names
from .program import TiledProgram
from .tiles import NativeTiles
from .tokens import Tokens

NAMES = Names(conv_shortcut="nin_shortcut")
LEVELS, RESNETS = 6, 2
#: Levels after which rows and columns are halved, and those after which frames are halved, too.
HALVED, IN_TIME = (0, 1, 2, 3), (1, 2)
#: Channels of a head, frames per latent, and pixels per side of a latent.
HEAD, RATE, PATCH = 64, 4, 16
#: Pixels are normalised by ImageNet's mean and deviation.
OWN = NativeTiles(mean=(0.485, 0.456, 0.406), deviation=(0.229, 0.224, 0.225))
MEAN, DEVIATION = "latents_mean", "latents_std"
#: Decoders with fewer layers, by the number of those that they have kept.
REDUCED = {26: "LynnReal", 12: "LightVAE Lite", 8: "FastH3"}
#: Layers of Sol-H3-VAE. Its files were not seen: under H3's names they must not run as H3, in tiles.
SOL = 24
#: The tiles that LynnReal was trained in. ComfyUI decodes it in the family's, and so does its own program unless told.
LYNNREAL = replace(OWN, sides=((272, 0), (208, 16), (272, 16)))
#: Random weights, with the published statistics of latents to four digits.
DRAWS = Draws(
    1.4**0.5, 0.1, 0.05, (("scale1", 0.5, 0.1), ("scale2", 0.5, 0.1), ("register_tokens", 0.0, 1.0)),
    (
        ("decoder.mask_token", (0.0,)),
        (MEAN, (
            0.8581, -0.9607, 1.0662, -0.5090, -0.2728, -1.3675, -0.2553, -0.2691, -0.5377, -0.0464, 0.6657, 0.1969,
            -0.5461, -0.4035, -0.2368, 0.2593, -0.3013, 0.2113, -1.1207, 0.3582, -0.0423, 0.2605, 0.2286, 0.7056,
        )),
        (DEVIATION, (
            1.2224, 1.2767, 1.6832, 1.7549, 1.5636, 2.1941, 0.9653, 1.0570, 0.8419, 0.7730, 1.8956, 0.9468,
            0.7997, 0.4499, 0.7197, 0.6936, 2.9611, 2.7694, 3.0496, 2.1088, 3.2762, 3.1627, 2.2817, 2.6128,
        )),
    ),
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Config(Prunable):
    """encoder_widths: from full to lowest resolution; None: the encoder is absent from the file, as the decoder is if
    layers is 0. width: channels of the decoder's tokens; inner: channels between the products of its gates. pruned:
    names of the encoder's residual blocks that have kept no more than their shortcut."""

    encoder_widths: Widths | None
    width: int
    layers: int
    inner: int
    registers: int = 4
    latent_channels: int = 24
    norm_groups: int = DEFAULT_GROUPS
    pruned: tuple[str, ...] = ()

    @property
    def decoder_widths(self) -> Widths | None:
        return (self.width, self.inner) if self.layers else None

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks. Raises InputError for impossible ones."""
        encoder, pruned = _encoder(shapes)
        groups = groups_of(norm_groups, encoder)
        layer = "decoder.transformer_blocks.0.ff"
        width = length(shapes, "decoder.x_embedder.bias")
        inner = length(shapes, f"{layer}.w1.bias", length(shapes, f"{layer}.net.0.proj.bias"))  # or before `prepared`
        layers = rows(shapes, "decoder.transformer_blocks")
        registers = shapes.get("decoder.register_tokens", (1, 4, width))[-2]
        if layers and (width % HEAD or not width or inner % 2):
            raise InputError(f"its transformer's {width} channels are no heads of {HEAD}")
        if layers == SOL:
            raise InputError(f"its decoder has {SOL} layers, as Sol-H3's has, which works in windows of whole frames: "
                             "not yet run here; decode with the program that it came with")  # fmt: skip
        latent = length(shapes, "post_quant_conv.bias", length(shapes, MEAN, 24))
        return cls(encoder, width, layers if width and inner else 0, inner // 2, registers, latent, groups,
                   pruned)  # fmt: skip


def _encoder(shapes: Shapes) -> tuple[Widths | None, tuple[str, ...]]:
    """Return the widths of the encoder's levels, and the names of its pruned blocks: of those every tensor but the
    shortcut's is missing. The width of a level whose blocks are all pruned is that of its resampling or shortcut, or of
    the level before."""
    if "encoder.conv_in.bias" not in shapes:
        return None, ()
    widths = [length(shapes, "encoder.conv_in.bias")]
    blocks = [f"encoder.down.{i}.block.{j}" for i, j in itertools.product(range(LEVELS), range(RESNETS))]
    for i in range(LEVELS):
        parts = [f"block.{j}.{part}" for j in range(RESNETS) for part in ("conv1", "conv2", NAMES.conv_shortcut)]
        names = [f"encoder.down.{i}.{part}.bias" for part in (*parts, "downsample.conv")]
        widths.append(next((length(shapes, name) for name in names if name in shapes), widths[-1]))
    pruned = pruned_blocks(shapes, blocks, NAMES.conv_shortcut)
    return (tuple(widths[1:]), pruned) if len(pruned) < len(blocks) else (None, ())


def decoder(config: Config) -> Program:
    tokens = Tokens(
        "transformer_blocks", config.latent_channels, config.layers, config.width, config.inner, HEAD,
        config.registers, RATE, PATCH, f"/{MEAN}", f"/{DEVIATION}", "/post_quant_conv",
    )  # fmt: skip
    trained = LYNNREAL if REDUCED.get(config.layers) == "LynnReal" else None
    return TiledProgram(
        "decoder", (TILES, tokens), config.latent_channels, component=__name__, own=OWN, trained=trained
    )


def variant(config: Config) -> str:
    """Return the name of a decoder with fewer layers than the published one; "" for others."""
    if not 0 < config.layers < PUBLISHED.layers:
        return ""
    if (name := REDUCED.get(config.layers)) is None:
        return f"{config.layers} of {PUBLISHED.layers} layers"
    return f"{name} ({config.layers} of {PUBLISHED.layers} layers)"


def encoder(config: Config) -> Program:
    w, norm, moments = config.encoder_widths, Group(config.norm_groups), 2 * config.latent_channels
    pruned = [name.removeprefix("encoder.") for name in config.pruned]

    def level(i: int) -> list[Step]:
        ins = (w[max(i - 1, 0)], *[w[i]] * (RESNETS - 1))
        blocks = (residual(f"down.{i}.block.{j}", c, w[i], norm, NAMES, pruned) for j, c in enumerate(ins))
        steps = list(itertools.chain(*blocks))
        if i in HALVED:
            steps.append(StridedDown(f"down.{i}.downsample", w[i], temporal=i in IN_TIME, reflected=True))
        return steps

    items = (
        Conv("conv_in", 3, w[0]), *level(0), STEP,
        *itertools.chain(*map(level, range(1, LEVELS))), TILES,
        Moments("norm_out", "conv_out", w[-1], moments, norm),
        Linear("/quant_conv", moments), Standardise(f"/{MEAN}", f"/{DEVIATION}", config.latent_channels),
    )  # fmt: skip
    return TiledProgram("encoder", items, 3, Style(head="zero", border="reflect"), component=__name__, own=OWN)


PUBLISHED = Config((128, 256, 256, 512, 512, 1024), 2048, 36, 8192)
ARCHITECTURE = Architecture(
    KeySet(
        "minimaxh3",
        (
            ("decoder.transformer_blocks.0.scale1", "decoder.transformer_blocks.0.scale2"),
            (MEAN, DEVIATION, "encoder.down.0.block.0.norm1.weight"),
            (MEAN, DEVIATION, "encoder.down.3.downsample.conv.weight"),
        ),
    ),
    16, RATE, 1.0, Config.from_shapes, encoder, decoder,
    published=Published(
        "MiniMax H3", PUBLISHED, r"minimax(?!.*(audio|music|sol))", ("minimax", "h3"), draws=DRAWS,
        others=tuple((name, replace(PUBLISHED, layers=layers)) for name, layers in (
            (r"lynn[ _.-]*real", 26), (r"light[ _.-]*vae[ _.-]*lite|h3[ _.-]*lite", 12), (r"8l(?![a-z])", 8),
        )),
    ),
    sections=OWN, coded=True,
    host="comfy.ldm.minimax.vae.MiniMaxH3VideoVAE", wide=(MEAN, DEVIATION), variant=variant,
    prepared=minimax_h3_names.merged,
)  # fmt: skip
#: Diffusers' names, which LightX2V's files of one half each have, too.
DIFFUSERS = KeySet("minimaxh3-diffusers", (
    ("decoder.transformer_blocks.0.attn.to_q.weight", "decoder.proj_in.weight"),
    ("encoder.down_blocks.3.downsamplers.0.conv.weight", "encoder.down_blocks.0.downsamplers.0.conv.weight",
     MEAN, DEVIATION),
), minimax_h3_names.native)  # fmt: skip
