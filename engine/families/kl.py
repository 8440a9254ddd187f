"""Image VAEs of the KL family: 8x8 pixels into 4 channels (Stable Diffusion 1, 2 and XL), 16 (SD3, Flux, Z-Image) or
32, which Flux.2 packs by 2x2 into 128. Every latent is a separate picture."""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass, fields

from ..errors import InputError
from ..network.architecture import (
    DEFAULT_GROUPS,
    Architecture,
    KeySet,
    Published,
    Shapes,
    Widths,
    groups_of,
    holds,
    length,
    level_widths,
    rows,
)
from ..network.ops.attention import Attention, Parts
from ..network.ops.conv import Conv
from ..network.ops.down import StridedDown
from ..network.ops.ends import Linear, Moments, Pixels
from ..network.ops.norm import Group
from ..network.ops.resnet import Names, Res
from ..network.ops.up import NearestUp
from ..network.packing import PackedLatents
from ..network.program import STEP, TILES, Program, Step

NAMES = Names(conv_shortcut="nin_shortcut")
PARTS = Parts("norm", "q", "k", "v", "proj_out", convs=2)


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution, e.g. (128, 256, 512, 512). None: that component is absent from the file.

    latent_channels: channels that the file's 1x1 convolutions make of the network's z_channels, or the same without
    them. resnets: blocks per level of the encoder and of the decoder. attends: the levels of each, counted from full
    resolution, in which attention follows every block.
    """

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 16
    z_channels: int = 16
    quantised: bool = False
    resnets: tuple[int, int] = (2, 3)
    attention: bool = True
    norm_groups: int = DEFAULT_GROUPS
    attends: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def __repr__(self) -> str:
        """Leave out what only a few files have: kernels that ship are filed under the text of all others."""
        shown = [f.name for f in fields(self) if f.name != "attends" or any(self.attends)]
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` None means 32 if it divides all widths."""
        encoder, decoder = _widths(shapes, "encoder.down"), _widths(shapes, "decoder.up")
        colours = {"decoder.conv_out.bias": length(shapes, "decoder.conv_out.bias", 3)}
        if encoder:
            colours["encoder.conv_in.weight"] = _inputs(shapes, "encoder.conv_in", encoder[0]) or 3
        for name, number in colours.items():
            if number != 3:
                raise InputError(f"{name} is for {number} colour channels; only RGB networks are run")
        z = _inputs(shapes, "decoder.conv_in", decoder[-1]) if decoder else 0
        z = z or length(shapes, "encoder.conv_out.bias", 32) // 2
        # A weight counts only if its size is possible: other tensors of that name belong to no part of these networks.
        weights = (math.prod(shapes.get(f"{conv}.weight", (0,))) for conv in ("post_quant_conv", "quant_conv"))
        quantised = any(size and size % z == 0 for size in weights)
        latent = z
        if quantised and "post_quant_conv.weight" in shapes:
            latent = math.prod(shapes["post_quant_conv.weight"]) // z
        elif quantised and "quant_conv.bias" in shapes:
            latent = length(shapes, "quant_conv.bias") // 2
        _check_kind(shapes, encoder, z, latent)
        resnets = _resnets(shapes, "encoder.down") or 2, _resnets(shapes, "decoder.up") or 3
        attention = holds(shapes, "encoder.mid.attn_1", "decoder.mid.attn_1")
        groups = groups_of(norm_groups, encoder, decoder)
        attends = _attends(shapes, "encoder.down"), _attends(shapes, "decoder.up")
        return cls(encoder, decoder, latent, z, quantised, resnets, attention, groups, attends)


def _check_kind(shapes: Shapes, encoder: Widths | None, z: int, latent: int) -> None:
    """Raise InputError for networks under the same names that compute something else.

    The encoder of a VQ model gives `z` channels, without deviations. Without its encoder, only its codes identify it;
    next to a complete KL encoder they mean nothing.
    """
    codes = shapes.get("quantize.embedding.weight", ())[1:] == (latent,)
    moments = length(shapes, "encoder.conv_out.bias", 2 * z) if encoder else 2 * z
    if moments == z or (codes and not encoder):
        raise InputError("a VQ model, whose latents are rounded to a list of codes: this pack runs none; take the VAE "
                         "that the model was published with, or the program that it came with")  # fmt: skip


def _attends(shapes: Shapes, row: str) -> tuple[int, ...]:
    return tuple(i for i in range(rows(shapes, row)) if holds(shapes, f"{row}.{i}.attn"))


def _resnets(shapes: Shapes, row: str) -> int:
    """Return the number of blocks per level."""
    return max((rows(shapes, f"{row}.{i}.block") for i in range(rows(shapes, row))), default=0)


def _widths(shapes: Shapes, row: str) -> Widths | None:
    levels = rows(shapes, row)
    return level_widths(shapes, [f"{row}.{i}.block.0.conv1.bias" for i in range(levels)]) if levels > 1 else None


def _inputs(shapes: Shapes, conv: str, width: int) -> int:
    """Return the channels that a 3x3 convolution to `width` reads, whatever the shape of its stored weight; 0: it is
    absent."""
    shape = shapes.get(f"{conv}.weight")
    if shape is not None and len(shape) == 5:
        raise InputError(f"{conv}.weight is a convolution in time too: not an image VAE of this family")
    return 0 if shape is None else math.prod(shape) // (9 * width)


def decoder(config: Config) -> Program:
    w, z, norm = config.decoder_widths[::-1], config.z_channels, Group(config.norm_groups)
    last = len(w) - 1

    def level(i: int) -> list[Step]:
        ins, attends = (w[max(i - 1, 0)], *[w[i]] * (config.resnets[1] - 1)), last - i in config.attends[1]
        return _blocks(f"up.{last - i}", ins, w[i], norm, attends)

    def up(i: int) -> Step:
        return NearestUp(f"up.{last - i}.upsample", w[i], w[i], temporal=False, conv="conv")

    levels = [[*level(i), up(i)] if i < last else level(i) for i in range(len(w))]
    # Attention sees whole frames; after a change of resolution it sees tiles, where the user asks for those.
    lowest = len(levels[0]) - 1 if last in config.attends[1] else 0
    first = [Linear("/post_quant_conv", config.latent_channels, z)] if config.quantised else []
    return Program.of(
        "decoder", config.latent_channels,
        *first, Conv("conv_in", z, w[0]), *middle(w[0], norm, config.attention), *levels[0][:lowest], TILES,
        *levels[0][lowest:], *itertools.chain(*levels[1:]), Pixels("norm_out", "conv_out", w[last], norm),
        taps=1, single=True,
    )  # fmt: skip


def encoder(config: Config) -> Program:
    w, z, norm = config.encoder_widths, config.z_channels, Group(config.norm_groups)
    last = len(w) - 1

    def level(i: int) -> list[Step]:
        ins = (w[max(i - 1, 0)], *[w[i]] * (config.resnets[0] - 1))
        steps = _blocks(f"down.{i}", ins, w[i], norm, i in config.attends[0])
        if i < last:
            steps.append(StridedDown(f"down.{i}.downsample", w[i], temporal=False))
        return steps

    end = [Linear("/quant_conv", 2 * z, 2 * config.latent_channels)] if config.quantised else []
    return Program.of(
        "encoder", 3,
        Conv("conv_in", 3, w[0]), *level(0), STEP,
        *itertools.chain(*map(level, range(1, last))), TILES,
        *level(last), *middle(w[last], norm, config.attention),
        Moments("norm_out", "conv_out", w[last], 2 * z, norm), *end,
        taps=1, single=True,
    )  # fmt: skip


def _blocks(place: str, ins: tuple[int, ...], width: int, norm: Group, attends: bool) -> list[Step]:
    """Return the blocks of a level."""
    steps: list[Step] = []
    for j, c_in in enumerate(ins):
        steps.append(Res(f"{place}.block.{j}", c_in, width, norm, NAMES))
        if attends:
            steps.append(Attention(f"{place}.attn.{j}", width, norm, parts=PARTS))
    return steps


def middle(width: int, norm: Group, attends: bool = True) -> list[Step]:
    """Return the steps at the latent's resolution."""
    attention = [Attention("mid.attn_1", width, norm, parts=PARTS)] if attends else []
    return [
        Res("mid.block_1", width, width, norm, NAMES), *attention, Res("mid.block_2", width, width, norm, NAMES)
    ]  # fmt: skip


def _spatial(config: Config) -> dict[str, int]:
    return {"spatial": 2 ** (len(config.decoder_widths or config.encoder_widths or ()) - 1)}


# -- names ------------------------------------------------------------------------------------------------------------

_ATTENTION = {
    "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out",
    "query": "q", "key": "k", "value": "v", "proj_attn": "proj_out",
}  # fmt: skip
_MOVED = {"encoder.quant_conv": "quant_conv", "decoder.post_quant_conv": "post_quant_conv"}


def original(names: list[str]) -> dict[str, str | None]:
    """Map diffusers' names to the original ones; others stay as they are."""
    numbers = (re.match(r"decoder\.up_blocks\.(\d{1,3})\.resnets\.0\.conv1\.", name) for name in names)
    levels = 1 + max((int(m[1]) for m in numbers if m), default=0)

    def up(m: re.Match[str]) -> str:
        return f"decoder.up.{levels - 1 - int(m[1])}." if int(m[1]) < levels else m[0]

    def one(name: str) -> str:
        name = re.sub(r"^decoder\.up_blocks\.(\d{1,3})\.", up, name)
        name = re.sub(r"^encoder\.down_blocks\.(\d+)\.", r"encoder.down.\1.", name)
        name = re.sub(r"\.(up|down)samplers\.0\.", r".\1sample.", name)
        name = re.sub(r"\.mid_block\.resnets\.(\d)\.", lambda m: f".mid.block_{int(m[1]) + 1}.", name)
        name = re.sub(r"\.resnets\.(\d+)\.", r".block.\1.", name)
        name = name.replace(".conv_shortcut.", ".nin_shortcut.").replace(".conv_norm_out.", ".norm_out.")
        name = name.replace(".mid_block.attentions.0.", ".mid.attn_1.")
        name = re.sub(r"^(decoder\.up|encoder\.down)\.(\d+)\.attentions\.(\d+)\.", r"\1.\2.attn.\3.", name)
        if m := re.fullmatch(r"(.+\.attn(?:_1|\.\d+))\.(.+)\.(\w+)", name):
            name = f"{m[1]}.{_ATTENTION.get(m[2], m[2])}.{m[3]}"
        return name

    return {name: one(name) for name in names}


def _beside(names: list[str]) -> dict[str, str | None]:
    """Map the names of 1x1 convolutions that some files store inside the encoder and decoder."""
    return {n: f"{_MOVED.get(n.rpartition('.')[0], n.rpartition('.')[0])}.{n.rpartition('.')[2]}" for n in names}


DIFFUSERS = KeySet(
    "kl-diffusers",
    (("decoder.up_blocks.0.upsamplers.0.conv.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"),),
    original,
)
_WIDTHS = (128, 256, 512, 512)
_UP, _DOWN = "decoder.up.1.upsample.conv.weight", "encoder.down.1.downsample.conv.weight"
#: ComfyUI runs all of these in bf16; Stable Diffusion's leave fp16's range.
_architecture = functools.partial(
    Architecture, spatial=8, temporal=1, scale=1.0, configure=Config.from_shapes, encoder=encoder, decoder=decoder,
    native="bf16", sized=_spatial,
)  # fmt: skip
SD = _architecture(
    KeySet(
        "sd",
        # Flux's layers and 1x1 convolutions, inside the encoder and decoder or outside.
        tuple(
            (layer, f"{place}{conv}.weight", f"{place}{conv}.bias")
            for half, conv, layer in (("decoder.", "post_quant_conv", _UP), ("encoder.", "quant_conv", _DOWN))
            for place in ("", half)
        ),
        _beside,
    ),
    published=Published(
        "Stable Diffusion", Config(_WIDTHS, _WIDTHS, 4, 4, quantised=True),
        r"sd[ _.-]*(1|2|xl|vae)|vae[ _.-]*ft[ _.-]|kl[ _.-]*f8|stable[ _.-]*diffusion", ("stable diffusion", "sdxl"),
    ),
    several=True,  # of Stable Diffusion and SDXL
)  # fmt: skip
FLUX = _architecture(
    KeySet("flux", ((_UP, "decoder.conv_in.weight"), (_DOWN, "encoder.conv_in.weight"))),
    published=Published(
        "Flux", Config(_WIDTHS, _WIDTHS), r"\bae\.(safetensors|gguf)|flux|sd3|z[ _.-]*image|chroma|lumina|netayume",
        ("flux", "sd3", "z-image"),
    ),
    several=True,  # of Flux and SD3
)  # fmt: skip
FLUX2 = _architecture(
    KeySet("flux2", tuple(("bn.running_mean", "bn.running_var", layer) for layer in (_UP, _DOWN))),
    packing=lambda config: ("bn", PackedLatents(config.latent_channels)),
    published=Published(
        "Flux.2", Config(_WIDTHS, _WIDTHS, 32, 32, quantised=True), r"flux[ _.-]*2|full[ _.-]*encoder[ _.-]*small",
        ("flux.2",),
        others=((r"small[ _.-]*decoder|vae[ _.-]*small",
                 Config(_WIDTHS, (96, 192, 384, 384), 32, 32, quantised=True)),),
    ),
)  # fmt: skip
