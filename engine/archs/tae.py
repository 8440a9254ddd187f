"""Tiny autoencoders of pictures: TAESD of Stable Diffusion, SDXL, SD3 and Flux (TAEF1), and TAEF2 of Flux.2; 8x8 pixels
into the latents of those."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..network.ops.rectified import Rectified, RectifiedRes, Scaled
from ..network.packing import Repacked
from ..network.program import STEP, TILES, Program, Step
from .arch import Architecture, Draws, KeySet, Published, Shapes, Widths, length, level_widths

#: Blocks of each level, from full to lowest resolution.
_ENCODER, _DECODER = ((1,), (3, 4, 5), (7, 8, 9), (11, 12, 13)), ((18,), (13, 14, 15), (8, 9, 10), (3, 4, 5))
SCALE, SHIFT = "vae_scale", "vae_shift"
#: (name of a file, scale and shift of the latents that it takes): ComfyUI knows them by the name, too.
_NAMED = (
    (r"taesdxl", 0.13025, 0.0), (r"taesd3", 1.5305, 0.0609), (r"taef1", 0.3611, 0.1159), (r"taesd", 0.18215, 0.0),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution; None: that component is absent from the file. pooled: blocks at the
    latent's resolution see the whole picture (TAEF2)."""

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 4
    pooled: bool = False
    norm_groups: None = None

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None, pooled: bool = False) -> Config:
        """Return the sizes of a file's networks; `norm_groups` has no meaning here. Raises InputError."""
        encoder, decoder = (
            level_widths(shapes, [f"{half}.{blocks[0]}.conv.0.bias" for blocks in levels])
            for half, levels in (("encoder", _ENCODER), ("decoder", _DECODER))
        )
        for name, colours in (("decoder.19.bias", 0), ("encoder.0.weight", 1)):
            if name in shapes and (len(shapes[name]) <= colours or shapes[name][colours] != 3):
                raise InputError(f"{name} has the shape {shapes[name]}; only networks of RGB are run")
        first = shapes.get("decoder.1.weight", ())
        latent = first[1] if len(first) == 4 else length(shapes, "encoder.14.bias", 4)
        return cls(encoder, decoder, latent, pooled)


def decoder(config: Config) -> Program:
    w = config.decoder_widths[::-1]

    def level(i: int) -> list[Step]:
        pooled = config.pooled and i == 0
        return [RectifiedRes(str(n), w[i], pooled) for n in _DECODER[3 - i]]

    ups = [Rectified(str(5 * i + 7), w[i], w[i + 1], to="double") for i in range(3)]
    return Program.of(
        "decoder", config.latent_channels,
        Scaled(f"/{SCALE}", f"/{SHIFT}"), Rectified("1", config.latent_channels, w[0], relu=True), *level(0), TILES,
        ups[0], STEP, *level(1), ups[1], *level(2), ups[2], *level(3), Rectified("19", w[3], 3, unit="after"),
        taps=1, single=True,
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w = config.encoder_widths

    def level(i: int) -> list[Step]:
        return [RectifiedRes(str(n), w[i], config.pooled and i == 3) for n in _ENCODER[i]]

    downs = [Rectified(str(n), a, b, to="half") for n, (a, b) in zip((2, 6, 10), itertools.pairwise(w), strict=True)]
    return Program.of(
        "encoder", 3,
        Rectified("0", 3, w[0], unit="before", block=8), *level(0), STEP,
        downs[0], *level(1), downs[1], *level(2), downs[2], TILES,
        *level(3), Rectified("14", w[3], config.latent_channels), Scaled(f"/{SCALE}", f"/{SHIFT}", leaves=True),
        taps=1, single=True,
    )  # fmt: skip


def native(names: list[str]) -> dict[str, str | None]:
    """Return {name: original name} of ComfyUI's combined files, and of files of one half, whose names have no prefix;
    None for names that stay."""
    half = "decoder" if "19.weight" in names else "encoder"

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
                         "taesdxl, taesd3 or taef1, whichever it is")  # fmt: skip
    for name, value in zip((SCALE, SHIFT), named, strict=True):
        out.setdefault(name, torch.tensor(value, dtype=torch.float32, device="cpu"))
    return out


def _architecture(keys: KeySet, published: Published, **others: object) -> Architecture:
    pooled = published.config.pooled
    return Architecture(
        keys, 8, 1, 1.0, functools.partial(Config.from_shapes, pooled=pooled), encoder, decoder, published=published,
        prepared=functools.partial(scaled, pooled=pooled), wide=(SCALE, SHIFT), **others,
    )  # fmt: skip


_WIDTHS = (64, 64, 64, 64)
#: Random pictures lie around grey.
_DRAWS = Draws(1.0, 0.1, 0.05, (("decoder.19.bias", 0.5, 0.05),), ((SCALE, (1.0,)), (SHIFT, (0.0,))))
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
#: ComfyUI's form of both halves in one.
COMBINED = KeySet("taesd-comfyui", (
    ("taesd_decoder.19.weight", "taesd_decoder.3.conv.0.weight"),
    ("taesd_encoder.14.weight", "taesd_encoder.11.conv.0.weight"),
), native)  # fmt: skip
#: The published files of one half each.
HALVES = KeySet("taesd-half", (("19.weight", "3.conv.0.weight"), ("14.weight", "11.conv.0.weight")), native)
