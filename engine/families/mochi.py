"""Mochi's VAE: 8x8 pixels and 6 frames into 12 channels, causal, with replicated borders. Its encoder has attention
among all frames of a clip."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InputError
from ..network.architecture import Architecture, KeySet, Published, Shapes, holds, length, rows
from ..network.ops.attention import TimeAttention
from ..network.ops.ends import Fourier, LinearMoments, LinearPixels, Pointwise
from ..network.ops.norm import Group, NoNorm
from ..network.ops.resnet import Names, Res
from ..network.program import STEP, TILES, Mark, Program, Step
from .ltx.depth import LinearUp, Stride, StrideDown

NAMES = Names("stack.0", "stack.2", "stack.3", "stack.5")
GROUPS = 32
#: Channels of one head of the encoder's attention.
HEAD = 32
#: Samples per position -> their number along frames, rows and columns.
STRIDES: dict[int, Stride] = {12: (3, 2, 2), 8: (2, 2, 2), 4: (1, 2, 2)}


@dataclass(frozen=True)
class Level:
    """Residual blocks of one width. stride: of the resampling after them (decoder) or before them (encoder), if any.
    attends: attention in time follows each block."""

    width: int
    layers: int
    stride: Stride | None = None
    attends: bool = False


Levels = tuple[Level, ...]


@dataclass(frozen=True)
class Config:
    """Levels in the order of the data. None: that component is absent from the file."""

    encoder_levels: Levels | None
    decoder_levels: Levels | None
    latent_channels: int = 12
    norm_groups: int = GROUPS

    @property
    def encoder_widths(self) -> tuple[int, ...] | None:
        return None if self.encoder_levels is None else tuple(level.width for level in self.encoder_levels)

    @property
    def decoder_widths(self) -> tuple[int, ...] | None:
        return None if self.decoder_levels is None else tuple(level.width for level in self.decoder_levels)

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` None means 32. Raises InputError."""
        config = cls(_encoder_levels(shapes), _decoder_levels(shapes), _latent(shapes), norm_groups or GROUPS)
        odd = [w for w in (*(config.encoder_widths or ()), *(config.decoder_widths or ())) if w % config.norm_groups]
        if odd:
            raise InputError(f"widths {odd} do not divide into {config.norm_groups} norm groups; pass norm_groups=N")
        return config


def _latent(shapes: Shapes) -> int:
    if len(shapes.get("decoder.blocks.0.0.weight", ())) == 5:
        return shapes["decoder.blocks.0.0.weight"][1]
    return shapes["encoder.output_proj.weight"][0] // 2 if "encoder.output_proj.weight" in shapes else 12


def _numbers(shapes: Shapes, row: str, end: str) -> list[int]:
    found = (re.fullmatch(rf"{re.escape(row)}\.(\d{{1,3}})\.{re.escape(end)}", name) for name in shapes)
    return sorted(int(m[1]) for m in found if m)


def _decoder_levels(shapes: Shapes) -> Levels | None:
    if "decoder.blocks.0.0.bias" not in shapes or "decoder.output_proj.bias" not in shapes:
        return None
    ups = _numbers(shapes, "decoder.blocks", "proj.bias")
    width = length(shapes, "decoder.blocks.0.0.bias")
    levels = [Level(width, rows(shapes, "decoder.blocks.0") - 1)]
    for i in ups:
        after = "blocks.0." if i < ups[-1] else "0."
        made, following = length(shapes, f"decoder.blocks.{i}.proj.bias"), f"decoder.blocks.{i + 1}.{after}stack.2.bias"
        if following not in shapes or made // length(shapes, following) not in STRIDES:
            raise InputError(f"decoder.blocks.{i}.proj makes {made} channels, of which no resampling is known")
        samples = made // length(shapes, following)
        levels.append(Level(width, rows(shapes, f"decoder.blocks.{i}.blocks"), STRIDES[samples]))
        width = length(shapes, following)
    last = 1 + max(ups, default=0)
    return (*levels, Level(width, rows(shapes, f"decoder.blocks.{last}")))


def _encoder_levels(shapes: Shapes) -> Levels | None:
    if "encoder.layers.0.bias" not in shapes or "encoder.output_norm.bias" not in shapes:
        return None
    downs = _numbers(shapes, "encoder.layers", "layers.0.bias")
    first, last = min(downs, default=1) - 1, rows(shapes, "encoder.layers") - 1
    attends = holds(shapes, "encoder.layers.1.attn_block")
    levels = [Level(length(shapes, "encoder.layers.0.bias"), first, None, attends)]
    for order, i in enumerate(downs):
        kernel = shapes[f"encoder.layers.{i}.layers.0.weight"][2:]
        stride = tuple(kernel) if len(kernel) == 3 else (order + 1, 2, 2)
        row = f"encoder.layers.{i}.layers"
        width, attends = length(shapes, f"{row}.0.bias"), holds(shapes, f"{row}.1.attn_block")
        levels.append(Level(width, rows(shapes, row) - 1, stride, attends))
    attends = holds(shapes, f"encoder.layers.{last}.attn_block")
    return (*levels, Level(levels[-1].width, last - max(downs, default=0), None, attends))


def decoder(config: Config) -> Program:
    norm, (low, *ups, end) = Group(config.norm_groups, eps=1e-5), config.decoder_levels
    items: list[Step | Mark] = [Pointwise("blocks.0.0", config.latent_channels, low.width)]
    items += [Res(f"blocks.0.{j + 1}", low.width, low.width, norm, NAMES) for j in range(low.layers)]
    items.append(TILES)
    for i, level in enumerate(ups, 1):
        width, after = level.width, (ups[i] if i < len(ups) else end).width
        items += [Res(f"blocks.{i}.blocks.{j}", width, width, norm, NAMES) for j in range(level.layers)]
        items += [LinearUp(f"blocks.{i}.proj", width, after, level.stride), *([STEP] if i < len(ups) + 1 else [])]
    items += [Res(f"blocks.{len(ups) + 1}.{j}", end.width, end.width, norm, NAMES) for j in range(end.layers)]
    return Program.of(
        "decoder", config.latent_channels, *items, LinearPixels("silu", "output_proj", end.width, NoNorm()),
        border="replicate", single=True,
    )  # fmt: skip


def encoder(config: Config) -> Program:
    norm, (first, *downs, last) = Group(config.norm_groups, eps=1e-5), config.encoder_levels

    def row(level: Level, names: list[str]) -> list[Step]:
        steps: list[Step] = []
        for name in names:
            steps.append(Res(name, level.width, level.width, norm, NAMES))
            if level.attends:
                steps.append(TimeAttention(f"{name}.attn_block", level.width, norm, HEAD))
        return steps

    waves = Fourier("waves")
    items: list[Step | Mark] = [
        waves, Pointwise("layers.0", waves.channels(3), first.width, matrix=True),
        *row(first, [f"layers.{j + 1}" for j in range(first.layers)]), STEP,
    ]  # fmt: skip
    width, at = first.width, first.layers + 1
    for i, level in enumerate(downs, at):
        items.append(StrideDown(f"layers.{i}.layers.0", width, level.width, level.stride, blocks=True))
        items += row(level, [f"layers.{i}.layers.{j + 1}" for j in range(level.layers)])
        width = level.width
    items += [TILES, *row(last, [f"layers.{at + len(downs) + j}" for j in range(last.layers)])]
    moments = LinearMoments("output_norm", "output_proj", width, 2 * config.latent_channels, norm)
    return Program.of("encoder", 3, *items, moments, border="replicate", single=True)


def _native(names: list[str]) -> dict[str, str | None]:
    """Add the name of the component, which files with only one may leave out."""
    half = "decoder" if any(name.startswith("blocks.") for name in names) else "encoder"
    return {n: n if n.startswith(("decoder.", "encoder.")) else f"{half}.{n}" for n in names}


def _published() -> Config:
    encoder_levels = (
        Level(64, 3), Level(128, 3, (1, 2, 2), True), Level(256, 4, (2, 2, 2), True), Level(384, 6, (3, 2, 2), True),
        Level(384, 3, None, True),
    )  # fmt: skip
    decoder_levels = (
        Level(768, 3), Level(768, 6, (3, 2, 2)), Level(512, 4, (2, 2, 2)), Level(256, 3, (1, 2, 2)), Level(128, 3)
    )  # fmt: skip
    return Config(encoder_levels, decoder_levels)


#: A layer of each component that other networks do not have.
_KNOWN = (("decoder", "blocks.2.blocks.3.stack.5.weight"), ("encoder", "layers.4.layers.1.attn_block.attn.qkv.weight"))
ARCHITECTURE = Architecture(
    KeySet(
        "mochi",
        tuple(
            (f"{half}{layer}", f"{half}output_proj.weight")
            for name, layer in _KNOWN for half in (f"{name}.", "")
        ),
        _native,
    ),
    8, 6, 1.0, Config.from_shapes, encoder, decoder, native="fp16",
    published=Published("Mochi", _published(), r"mochi", ("mochi",)),
)  # fmt: skip
