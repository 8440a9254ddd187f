"""The VAEs of Wan 2.1 (which is Qwen-Image's too) and Wan 2.2: 4x causal temporal compression; 8x8 pixels into 16
channels, or 16x16 into 48, where the last 2x2 pixels are moved into channels."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import InputError
from ...network.architecture import (
    Architecture,
    KeySet,
    Prunable,
    Published,
    Shapes,
    Widths,
    in_either_half,
    length,
    level_widths,
    pruned_blocks,
)
from ...network.ops.attention import Attention
from ...network.ops.conv import Conv
from ...network.ops.down import FrameDown
from ...network.ops.ends import Linear, Moments, Patches, Pixels
from ...network.ops.norm import Length
from ...network.ops.resnet import Names, residual
from ...network.ops.up import NearestUp
from ...network.program import STEP, TILES, Program, Step
from . import names as wan_names
from .around import Around

#: The published numbering also counts activations and a dropout.
NAMES = Names("residual.0", "residual.2", "residual.3", "residual.6", "shortcut")
#: The rows of levels, and residual blocks of a level.
RESNETS = {"encoder.downsamples": 2, "decoder.upsamples": 3}


@dataclass(frozen=True, repr=False)
class Config(Prunable):
    """Widths from full to lowest resolution, e.g. (96, 192, 384, 384). None: that component is absent from the file.

    patch: pixels per side that become channels. 2 is Wan 2.2, whose levels are also nested, have shortcuts around them,
    and keep their width when they upsample; Wan 2.1 halves it.
    """

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 16
    patch: int = 1
    #: Channels of an input and an output pixel: 4 with transparency, 12 for 2x2 pixels of a picture twice as large.
    encoder_colours: int = 3
    decoder_colours: int = 3
    #: Norms take the length over all channels, without groups.
    norm_groups: None = None
    #: Residual blocks that have kept no more than their shortcut.
    pruned: tuple[str, ...] = ()

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None, patch: int = 1) -> Config:
        """Return the sizes of a file's networks; `norm_groups` has no meaning here."""
        nested = patch == 2
        for row, resnets in RESNETS.items():
            _check_depth(shapes, row, resnets, nested)
        pruned = pruned_blocks(shapes, _blocks(nested))
        encoder, decoder = (_widths(shapes, row, resnets, nested, pruned) for row, resnets in RESNETS.items())
        if decoder is not None:
            decoder = (decoder[3], decoder[2], decoder[1], decoder[0])
            if patch == 2 and any(low % high for high, low in itertools.pairwise(decoder)):
                raise InputError(f"decoder widths {decoder} do not divide each other, as its shortcuts need")
        gives = length(shapes, "decoder.head.2.bias", 3 * patch**2) // patch**2
        takes = 3
        if encoder and "encoder.conv1.weight" in shapes:
            takes = math.prod(shapes["encoder.conv1.weight"]) // (27 * encoder[0] * patch**2)
        for name, number in (("decoder.head.2.bias", gives), ("encoder.conv1.weight", takes)):
            if number < 3 or (patch > 1 and number != 3):
                known = "RGB networks" if patch > 1 else "networks of 3 and more"
                raise InputError(f"{name} is for {number} colour channels; only {known} are run")
        latent = 48 if patch == 2 else 16
        if "conv2.bias" in shapes:
            latent = length(shapes, "conv2.bias")
        elif "conv1.bias" in shapes:
            latent = length(shapes, "conv1.bias") // 2
        there = tuple(half for half, widths in (("encoder", encoder), ("decoder", decoder)) if widths)
        pruned = tuple(name for name in pruned if name.startswith(there))
        return cls(encoder, decoder, latent, patch, takes, gives, pruned=pruned)


def _blocks(nested: bool) -> list[str]:
    """Return the names of all residual blocks of a file."""
    ways = (("encoder", "down", 2), ("decoder", "up", 3))
    rows = [f"{half}.{_place(way, i, j, count, nested)}" for half, way, count in ways
            for i in range(4) for j in range(count)]  # fmt: skip
    return [*(f"{half}.middle.{i}" for half, _, _ in ways for i in (0, 2)), *rows]


def _widths(shapes: Shapes, row: str, resnets: int, nested: bool, pruned: Sequence[str]) -> Widths | None:
    """Return the widths of a component's levels, in the file's order: those of each level's first block, whose shortcut
    or else input tells it if it is pruned."""
    half, _, way = row.partition(".")
    first = [f"{half}.{_place(way.removesuffix('samples'), i, 0, resnets, nested)}" for i in range(4)]
    if not pruned:
        return level_widths(shapes, [f"{name}.residual.2.bias" for name in first])
    found, width = [], length(shapes, f"{half}.conv1.bias")
    for name in first:
        names = [f"{name}.{part}.bias" for part in ("residual.2", "shortcut")]
        given = next((n for n in names if n in shapes), None)
        if given is None and name not in pruned:
            return None
        width = width if given is None else length(shapes, given)
        found.append(width)
        if way == "upsamples" and not nested:
            width //= 2
    return tuple(found) if width else None


def _check_depth(shapes: Shapes, row: str, resnets: int, nested: bool) -> None:
    """Refuse networks with other numbers of levels, or of residual blocks in a level, by the places of their resampling
    layers."""
    inner = rf"\.{row.partition('.')[2]}\.(\d{{1,3}})" if nested else ""
    places = (re.match(rf"{re.escape(row)}\.(\d{{1,3}}){inner}\.(resample|time_conv)\.", name) for name in shapes)
    found = {tuple(int(n) for n in m.groups()[:-1]) for m in places if m}
    usual = {(i, resnets) if nested else (i * (resnets + 1) + resnets,) for i in range(3)}
    if not found <= usual:
        raise InputError(
            f"{row} has its layers in another order than Wan's published VAEs, whose 4 levels have {resnets} residual "
            "blocks each; decode with the program that it came with"
        )


def decoder(config: Config) -> Program:
    w, nested, latent = config.decoder_widths[::-1], config.patch == 2, config.latent_channels
    after = [n if nested else n // 2 for n in w]  # channels after a level's upsampler

    def level(i: int) -> list[Step]:
        ins = (w[0] if i == 0 else after[i - 1], w[i], w[i])
        steps = block_steps(config, "decoder", ((_place("up", i, j, 3, nested), c, w[i]) for j, c in enumerate(ins)))
        if i < 3:
            steps.append(NearestUp(_place("up", i, 3, 3, nested), w[i], after[i], temporal=i < 2))
        return [Around(f"upsamples.{i}", tuple(steps))] if nested and i < 3 else steps

    return Program.of(
        "decoder", latent,
        Linear("/conv2", latent), Conv("conv1", latent, w[0]), *middle(w[0], config, "decoder"), TILES,
        *level(0), STEP,
        *level(1), STEP,
        *level(2), *level(3), Pixels("head.0", "head.2", w[3], Length(), config.patch, config.decoder_colours),
        head="zero",
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w, nested, latent = config.encoder_widths, config.patch == 2, config.latent_channels

    def level(i: int) -> list[Step]:
        ins = (w[max(i - 1, 0)], w[i])
        steps = block_steps(config, "encoder", ((_place("down", i, j, 2, nested), c, w[i]) for j, c in enumerate(ins)))
        if i < 3:
            steps.append(FrameDown(_place("down", i, 2, 2, nested), w[i], temporal=i > 0))
        return [Around(f"downsamples.{i}", tuple(steps))] if nested else steps

    patches = [Patches("patches", 16)] if nested else []
    return Program.of(
        "encoder", config.encoder_colours,
        *patches, Conv("conv1", config.encoder_colours * config.patch**2, w[0]), *level(0), STEP,
        *level(1), *level(2), TILES,
        *level(3), *middle(w[3], config, "encoder"),
        Moments("head.0", "head.2", w[3], 2 * latent, Length()), Linear("/conv1", 2 * latent),
        head="zero",
    )  # fmt: skip


def middle(width: int, config: Any = None, half: str = "") -> list[Step]:
    """Return the steps at the latent's resolution. config, half: whose pruned blocks to leave out."""
    before, after = (block_steps(config, half, [(f"middle.{i}", width, width)]) for i in (0, 2))
    return [*before, Attention("middle.1", width, Length(), joint=True), *after]


def block_steps(config: Any, half: str, blocks: Iterable[tuple[str, int, int]]) -> list[Step]:
    """Return the steps of residual blocks (name, channels of the input and of the result)."""
    pruned = [name.removeprefix(f"{half}.") for name in getattr(config, "pruned", ()) if name.startswith(f"{half}.")]
    steps = (residual(name, c_in, c_out, Length(), NAMES, pruned) for name, c_in, c_out in blocks)
    return list(itertools.chain(*steps))


def _place(direction: str, level: int, index: int, resnets: int, nested: bool) -> str:
    """Return the published name of a level's layer: 2.1 numbers all layers of a component in one row, 2.2 nests
    them."""
    row = f"{direction}samples"
    return f"{row}.{level}.{row}.{index}" if nested else f"{row}.{level * (resnets + 1) + index}"


def _architecture(keys: KeySet, spatial: int, published: Published) -> Architecture:
    configure = functools.partial(Config.from_shapes, patch=published.config.patch)
    # The sampler applies the mean and deviation of the latents.
    return Architecture(
        keys, spatial, 4, 1.0, configure, encoder, decoder, native="bf16", fp16=True, published=published,
        variant=lambda config: _variant(config, published.config),
        unused=_HEADS if published.config.patch == 2 else r"(?!)",
    )  # fmt: skip


def _variant(config: Config, full: Config) -> str:
    """Return the name of a reduced decoder: by its widths, or by blocks that have no more than their shortcut."""
    if config.decoder_widths is None:
        return ""
    lost = sum(name.startswith("decoder.") for name in config.pruned)
    if lost:
        return f"LightVAE without {lost} of the decoder's 14 residual blocks"
    for part in (2, 4):
        if tuple(part * w for w in config.decoder_widths) == full.decoder_widths:
            return f"LightVAE with 1/{part} of the channels"
    return ""


_WIDTHS = (96, 192, 384, 384)
#: Of Matrix-Game's training.
_HEADS = r"dynamic_feature_projection_heads\."
#: LightVAE's of Wan 2.1, whose widths are a quarter, and Matrix-Game's of Wan 2.2, which has the whole encoder.
_LIGHT = Config((24, 48, 96, 96), (24, 48, 96, 96))
_FULL = Config((160, 320, 640, 640), (256, 512, 1024, 1024), 48, 2)
WAN21 = _architecture(
    KeySet("wan2.1", in_either_half("middle.0.residual.0.gamma", "middle.1.to_qkv.weight")
           + in_either_half("middle.1.to_qkv.weight", "head.0.gamma")),
    8,
    Published(
        "Wan 2.1", Config(_WIDTHS, _WIDTHS),
        # Qwen-Image 2.1's VAE is another network.
        r"wan|light[ _.-]*vaew|qwen[ _.-]*image(?![ _.-]*2[._]?1(?!\d))|ming[ _.-]*image|marigold[ _.-]*v2",
        ("wan", "qwen"),
        others=((r"qwen[ _.-]*image[ _.-]*layered|ming[ _.-]*image",
                 Config(_WIDTHS, _WIDTHS, encoder_colours=4, decoder_colours=4)),
                (r"light[ _.-]*vaew?2[._]?1", _LIGHT)),
    ),
)
WAN22 = _architecture(
    KeySet(
        "wan2.2",
        tuple(
            tuple(f"{row}.{i}.{row.partition('.')[2]}.0.residual.2.weight" for i in (0, 1))
            for row in ("decoder.upsamples", "encoder.downsamples")
        ) + tuple(
            tuple(f"{half}.{i}.{half.partition('.')[2]}.{j}.resample.1.weight" for i in (0, 1))
            for half, j in (("decoder.upsamples", 3), ("encoder.downsamples", 2))
        ),
    ),
    16,
    Published(
        "Wan 2.2",
        _FULL,
        r"wan[ _.-]*2[._]?2[ _.-]*(5b[ _.-]*)?vae|mg[ _.-]*light[ _.-]*vae",
        ("wan",), others=((r"light[ _.-]*vae", replace(_FULL, decoder_widths=(64, 128, 256, 256))),),
    ),
)
#: Diffusers' names of both versions.
DIFFUSERS = KeySet(
    "wan-diffusers",
    # HunyuanVideo 1.5's norms have the same names there, but its attention has others.
    in_either_half("mid_block.resnets.0.norm1.gamma", "mid_block.attentions.0.to_qkv.weight"),
    wan_names.native,
)
