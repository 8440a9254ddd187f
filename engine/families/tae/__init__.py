"""Tiny autoencoders of pictures: TAESD of Stable Diffusion, SDXL, SD3 and Flux (TAEF1), and TAEF2 of Flux.2, 8x8 pixels
into the latents of those; TAESANA of Sana, 32x32."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...network.architecture import Architecture, Draws, KeySet, Published, Shapes, Widths, length, level_widths
from ...network.packing import Repacked
from ...network.program import STEP, TILES, Mark, Program, Step
from .rectified import Rectified, RectifiedRes, Scaled

#: Blocks of each level, from full to lowest resolution.
_ENCODER, _DECODER = ((1,), (3, 4, 5), (7, 8, 9), (11, 12, 13)), ((18,), (13, 14, 15), (8, 9, 10), (3, 4, 5))
#: The same of 32x32 pixels. The encoder's begin at a quarter of the sides.
_DEEP_ENCODER = (4,), (6, 7, 8), (10, 11, 12), (14, 15, 16)
_DEEP_DECODER = (28,), (23, 24, 25), (18, 19, 20), *_DECODER[1:]
SCALE, SHIFT = "vae_scale", "vae_shift"
#: (name of a file, scale and shift of the latents that it takes): ComfyUI knows them by the name, too.
_NAMED = (
    (r"taesdxl", 0.13025, 0.0), (r"taesd3", 1.5305, 0.0609), (r"taef1", 0.3611, 0.1159), (r"taesd", 0.18215, 0.0),
    (r"taesana", 0.41407, 0.0),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution; None: that component is absent from the file. pooled: blocks at the
    latent's resolution see the whole picture (TAEF2). deep: of 32x32 pixels (TAESANA), with two more levels; the
    encoder's highest one is at half of the sides."""

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 4
    pooled: bool = False
    deep: bool = False
    norm_groups: None = None

    @classmethod
    def from_shapes(
        cls, shapes: Shapes, norm_groups: int | None = None, pooled: bool = False, deep: bool = False
    ) -> Config:
        """Return the sizes of a file's networks; `norm_groups` has no meaning here. Raises InputError."""
        ends = ["encoder.0.bias"] if deep else []
        encoder, decoder = (
            level_widths(shapes, [*first, *(f"{half}.{blocks[0]}.conv.0.bias" for blocks in levels)])
            for half, first, levels in (("encoder", ends, _DEEP_ENCODER if deep else _ENCODER),
                                        ("decoder", [], _DEEP_DECODER if deep else _DECODER))
        )  # fmt: skip
        for name, colours in ((f"decoder.{29 if deep else 19}.bias", 0), ("encoder.0.weight", 1)):
            if name in shapes and (len(shapes[name]) <= colours or shapes[name][colours] != 3):
                raise InputError(f"{name} has the shape {shapes[name]}; only networks of RGB are run")
        first = shapes.get("decoder.1.weight", ())
        latent = first[1] if len(first) == 4 else length(shapes, f"encoder.{17 if deep else 14}.bias", 4)
        return cls(encoder, decoder, latent, pooled, deep)


def decoder(config: Config) -> Program:
    w, levels = config.decoder_widths[::-1], (_DEEP_DECODER if config.deep else _DECODER)[::-1]

    def level(i: int) -> list[Step]:
        pooled = config.pooled and i == 0
        return [RectifiedRes(str(n), w[i], pooled) for n in levels[i]]

    items: list[Step | Mark] = [
        Scaled(f"/{SCALE}", f"/{SHIFT}"), Rectified("1", config.latent_channels, w[0], relu=True), *level(0), TILES,
    ]  # fmt: skip
    for i in range(len(levels) - 1):
        items += [Rectified(str(5 * i + 7), w[i], w[i + 1], to="double"), *([] if i else [STEP]), *level(i + 1)]
    last = Rectified(str(levels[-1][-1] + 1), w[-1], 3, unit="after")
    return Program.of("decoder", config.latent_channels, *items, last, taps=1, single=True)


def encoder(config: Config) -> Program:
    w, levels = config.encoder_widths, _DEEP_ENCODER if config.deep else _ENCODER

    def level(i: int) -> list[Step]:
        return [RectifiedRes(str(n), w[i - len(levels)], config.pooled and i == 3) for n in levels[i]]

    def halved(name: str, a: int, b: int, **others: Any) -> Step:
        return Rectified(name, a, b, relu=True, to="half", bias=True, **others)

    if config.deep:
        items: list[Step | Mark] = [halved("0", 3, w[0], unit="before", block=32), STEP, halved("2", w[0], w[1])]
    else:
        items = [Rectified("0", 3, w[0], unit="before", block=8)]
    items += [*level(0), *([] if config.deep else [STEP])]
    for i, (a, b) in enumerate(itertools.pairwise(w[-len(levels) :]), 1):
        items += [Rectified(str(levels[i][0] - 1), a, b, to="half"), *([TILES] if i == 3 else []), *level(i)]
    items += [
        Rectified(str(levels[-1][-1] + 1), w[-1], config.latent_channels),
        Scaled(f"/{SCALE}", f"/{SHIFT}", leaves=True),
    ]  # fmt: skip
    return Program.of("encoder", 3, *items, taps=1, single=True)


def native(names: list[str]) -> dict[str, str | None]:
    """Return {name: original name} of ComfyUI's combined files, and of files of one half, whose names have no prefix;
    None for names that stay."""
    half = "decoder" if "19.weight" in names or "29.weight" in names else "encoder"

    def one(name: str) -> str | None:
        if m := re.fullmatch(r"taesd_((?:en|de)coder\..+)", name):
            return m[1]
        return f"{half}.{name}" if re.match(r"\d+\.", name) else None

    return {name: one(name) for name in names}


def scaled(tensors: Mapping[str, Tensor], file: str, pooled: bool = False) -> dict[str, Tensor]:
    """Return a network's tensors with the scale and shift of its latents, where its file does not hold them. Raises
    InputError if nothing tells them."""
    out = dict(tensors)
    if SCALE in out and SHIFT in out:
        return out
    named = next(((scale, shift) for name, scale, shift in _NAMED if re.search(name, file, re.IGNORECASE)), None)
    if pooled:
        named = 1.0, 0.0
    if named is None:
        raise InputError("the scale of its latents is not in the file, and only a name tells it: call the file taesd, "
                         "taesdxl, taesd3, taef1 or taesana, whichever it is")  # fmt: skip
    for name, value in zip((SCALE, SHIFT), named, strict=True):
        out.setdefault(name, torch.tensor(value, dtype=torch.float32, device="cpu"))
    return out


def _architecture(keys: KeySet, published: Published, **others: object) -> Architecture:
    pooled, deep = published.config.pooled, published.config.deep
    configure = functools.partial(Config.from_shapes, pooled=pooled, deep=deep)
    return Architecture(
        keys, 32 if deep else 8, 1, 1.0, configure, encoder, decoder, published=published,
        prepared=functools.partial(scaled, pooled=pooled), wide=(SCALE, SHIFT), **others,
    )  # fmt: skip


_WIDTHS = (64, 64, 64, 64)
#: Random pictures lie around grey.
_DRAWS = Draws(
    1.0, 0.1, 0.05, tuple((f"decoder.{last}.bias", 0.5, 0.05) for last in (19, 29)), ((SCALE, (1.0,)), (SHIFT, (0.0,)))
)
TAESD = _architecture(
    KeySet("taesd", (
        ("decoder.19.weight", "decoder.3.conv.0.weight", "decoder.18.conv.0.weight"),
        ("encoder.14.weight", "encoder.11.conv.0.weight", "encoder.1.conv.0.weight"),
    )),
    Published("TAESD", Config(_WIDTHS, _WIDTHS), r"taesd|taef1", ("taesd", "taef1"), draws=_DRAWS),
    several=True,
)  # fmt: skip
TAEF2 = _architecture(
    KeySet("taef2", (
        ("decoder.19.weight", "decoder.3.pool.0.weight", "decoder.4.pool.0.weight"),
        ("encoder.14.weight", "encoder.11.pool.0.weight", "encoder.12.pool.0.weight"),
    )),
    Published("TAEF2", Config(_WIDTHS, _WIDTHS, 32, pooled=True), r"taef2", ("taef2",), draws=_DRAWS),
    packing=lambda config: ("repacked", Repacked(config.latent_channels)),
)  # fmt: skip
TAESANA = _architecture(
    KeySet("taesana", (
        ("decoder.29.weight", "decoder.3.conv.0.weight", "decoder.28.conv.0.weight"),
        ("encoder.17.weight", "encoder.2.weight", "encoder.16.conv.0.weight"),
    )),
    Published("TAESANA", Config((32, *_WIDTHS), (*_WIDTHS, 128, 256), 32, deep=True), r"taesana", ("taesana",),
              draws=_DRAWS),
)  # fmt: skip
_LAST = ("19.weight", "3.conv.0.weight"), ("29.weight", "28.conv.0.weight")
_FIRST = ("14.weight", "11.conv.0.weight"), ("17.weight", "16.conv.0.weight")
#: ComfyUI's form of both halves in one.
COMBINED = KeySet("taesd-comfyui", tuple(
    tuple(f"taesd_{half}.{name}" for name in names)
    for half, each in (("decoder", _LAST), ("encoder", _FIRST)) for names in each
), native)  # fmt: skip
#: The published files of one half each.
HALVES = KeySet("taesd-half", (*_LAST, *_FIRST), native)
