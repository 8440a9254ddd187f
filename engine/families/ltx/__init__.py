"""LTX-Video's VAEs, from 0.9.0 to LTX-2.5's convolutional one: 32x32 pixels and 8 frames into 128 channels; the last
4x4 pixels are moved into channels. Their decoders look ahead, their encoders are causal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InputError, one_line
from ...network.architecture import Architecture, KeySet, Published, Shapes, holds, length, rows
from ...network.ops.conv import Conv
from ...network.ops.ends import Moments, Patches, Pixels
from ...network.ops.norm import MeanSquare
from ...network.ops.resnet import Names, Res
from ...network.ops.statistics import Denormalise, Normalise
from ...network.program import STEP, TILES, Mark, Program, Step
from ...network.values import Border
from . import conditioned
from . import names as ltx_names
from .depth import DepthDown, DepthUp, Stride, StrideDown
from .description import beside_of, blocks_of, border, number, said_of, shortcuts_of, vae_of

NAMES = Names(conv1="conv1.conv", conv2="conv2.conv")
NORM = MeanSquare(1e-8)
DIRECT = "LTX's encoder was not measured with it"
STATISTICS = "/per_channel_statistics"
#: Factors of each kind of block along frames, rows and columns.
STRIDES: dict[str, Stride] = {"all": (2, 2, 2), "time": (2, 1, 1), "space": (1, 2, 2)}
#: Frames, and pixels per side, of a latent.
FRAMES, PIXELS = 8, 32
#: Statistics of the training data.
UNUSED = r"per_channel_statistics\.(channel|mean-of-stds(_over_std-of-means)?)$"
#: Values for decoding if a file names no others.
TIMESTEP, NOISE = 0.05, 0.025


@dataclass(frozen=True)
class Block:
    """One block of a network. layers > 0: that many residual blocks of one width. stride: a resampling, with or without
    a shortcut that has no parameters. Else one residual block to another width. noisy: its residual blocks add
    noise."""

    width: int
    layers: int = 0
    stride: Stride | None = None
    shortcut: bool = False
    noisy: bool = False


@dataclass(frozen=True)
class Config:
    """Blocks in the order of the data; None: that component is absent from the file. enters: channels after the first
    convolution. timestep None: the decoder takes none. shared: all channels of a moment have one variance."""

    encoder_blocks: tuple[Block, ...] | None
    decoder_blocks: tuple[Block, ...] | None
    encoder_enters: int = 0
    decoder_enters: int = 0
    latent_channels: int = 128
    patch: int = 4
    encoder_border: Border = "zero"
    decoder_border: Border = "reflect"
    causal: bool = False
    shared: bool = True
    timestep: float | None = None
    noise: float = 0.0
    norm_groups: None = None

    @property
    def encoder_widths(self) -> tuple[int, ...] | None:
        return _widths(self.encoder_blocks)

    @property
    def decoder_widths(self) -> tuple[int, ...] | None:
        return _widths(self.decoder_blocks)

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes without metadata: borders, shortcuts and strides that shapes do not show are those of
        0.9.x."""
        return cls.described(shapes, {})

    @classmethod
    def described(cls, shapes: Shapes, metadata: Mapping[str, object]) -> Config:
        """Return the sizes from shapes, and the rest from the JSON text that files have under "config".

        Raises InputError for impossible networks, and for parts that are not run.
        """
        given = vae_of(metadata) or beside_of(metadata)
        if given.get("norm_layer", "pixel_norm") != "pixel_norm":
            raise InputError(f"its norms are {given['norm_layer']}; only networks with pixel_norm are run")
        if given.get("dims", 3) != 3:
            raise InputError(f"its convolutions have dims={given['dims']}; only networks with 3 are run")
        if not given.get("encoder_causal", True) or given.get("patch_size_t", 1) != 1:
            raise InputError("its encoder looks ahead, or patches are longer than a frame: only networks of the "
                             "published kinds are run")  # fmt: skip
        decoder = _decoder_blocks(shapes, blocks_of(given, "decoder_blocks")[::-1], given)
        encoder = _encoder_blocks(shapes, blocks_of(given, "encoder_blocks"))
        latent, patch = 128, 4
        if "per_channel_statistics.mean-of-means" in shapes:
            latent = length(shapes, "per_channel_statistics.mean-of-means")
        if "decoder.conv_out.conv.bias" in shapes:
            patch = math.isqrt(length(shapes, "decoder.conv_out.conv.bias") // 3)
        for half, blocks in (("decoder", decoder), ("encoder", encoder)):
            strides = [b.stride for b in blocks or () if b.stride is not None]
            frames, rows, columns = (math.prod(s[axis] for s in strides) for axis in range(3))
            if blocks is not None and (frames, patch * rows, patch * columns) != (FRAMES, PIXELS, PIXELS):
                raise InputError(
                    f"its {half} has {frames} frames of {patch * rows}x{patch * columns} pixels for a latent; only "
                    f"networks with {FRAMES} of {PIXELS}x{PIXELS} are run"
                )
        borders = (border(given, "encoder", "zeros"), border(given, "decoder", "reflect"))
        takes = "decoder.timestep_scale_multiplier" in shapes or holds(shapes, "decoder.last_time_embedder")
        return cls(
            encoder, decoder,
            length(shapes, "encoder.conv_in.conv.bias"), length(shapes, "decoder.conv_in.conv.bias"),
            latent, patch, *borders, bool(given.get("causal_decoder", given.get("decoder_causal"))),
            length(shapes, "encoder.conv_out.conv.bias", latent + 1) != 2 * latent,
            number(given, "decode_timestep", TIMESTEP) if takes else None,
            number(given, "decode_noise_scale", NOISE) if takes else 0.0,
        )  # fmt: skip


def _widths(blocks: tuple[Block, ...] | None) -> tuple[int, ...] | None:
    """Return the widths of the blocks that consist of residual blocks in a row."""
    return None if blocks is None else tuple(b.width for b in blocks if b.layers)


def _layers(shapes: Shapes, block: str) -> tuple[int, int] | None:
    """Return (width, number) of the residual blocks of one width in a block."""
    bias = f"{block}.res_blocks.0.conv1.conv.bias"
    return (length(shapes, bias), rows(shapes, f"{block}.res_blocks")) if bias in shapes else None


def _decoder_blocks(
    shapes: Shapes, listed: list[tuple[str, Mapping[str, Any]]], given: Mapping[str, Any]
) -> tuple[Block, ...] | None:
    """given: the file's description."""
    if "decoder.conv_in.conv.bias" not in shapes or "decoder.conv_out.conv.bias" not in shapes:
        return None
    width, blocks = length(shapes, "decoder.conv_in.conv.bias"), []
    shortcuts = shortcuts_of(given)
    for i in range(rows(shapes, "decoder.up_blocks")):
        place = f"decoder.up_blocks.{i}"
        said = said_of(listed, i, place)
        noisy = any(name.startswith(f"{place}.") and ".per_channel_scale" in name for name in shapes)
        if (found := _layers(shapes, place)) is not None:
            blocks.append(Block(*found, noisy=noisy))
        elif f"{place}.conv1.conv.bias" in shapes:
            width = length(shapes, f"{place}.conv1.conv.bias")
            blocks.append(Block(width, noisy=noisy))
        elif f"{place}.conv.conv.bias" in shapes:
            made, after = length(shapes, f"{place}.conv.conv.bias"), _after(shapes, i + 1)
            kind = said[0].removeprefix("compress_") if said else _named(made / after, place)
            stride = _stride(kind, place)
            if kind != "all" and not given:
                raise InputError(
                    f"{place} changes the number of frames or their size alone: whether such networks have shortcuts "
                    "only a description tells; take the file with a config in its metadata, or put its folder's "
                    "config.json beside it"
                )
            # Without a description: blocks that reduce channels have a shortcut, as in all published networks with
            # shortcuts.
            has = said[1].get("residual", False) if said else shortcuts.pop(0) if shortcuts else after < width
            shortcut = kind == "all" and has
            width = made // math.prod(stride)
            blocks.append(Block(width, stride=stride, shortcut=bool(shortcut)))
        else:
            raise InputError(f"{place} is no block that is known")
    return tuple(blocks)


def _after(shapes: Shapes, index: int) -> int:
    """Return the channels that the decoder's block of this number takes."""
    place = f"decoder.up_blocks.{index}"
    if (found := _layers(shapes, place)) is not None:
        return found[0]
    for name in (f"{place}.conv1.conv.weight", f"{place}.conv.conv.weight", "decoder.conv_out.conv.weight"):
        if len(shapes.get(name, ())) == 5:
            return shapes[name][1]
    raise InputError(f"{place}: its channels are not known from the shapes of its weights")


def _named(samples: float, place: str) -> str:
    kind = next((k for k, stride in STRIDES.items() if math.prod(stride) == samples), None)
    if kind is None:
        raise InputError(f"{place}: {samples:g} samples for every position are no resampling that is known")
    return kind


def _stride(kind: str, place: str) -> Stride:
    if kind not in STRIDES:
        raise InputError(f"{place}: compress_{one_line(kind, 40)} is not one of {', '.join(STRIDES)}")
    return STRIDES[kind]


def _encoder_blocks(shapes: Shapes, listed: list[tuple[str, Mapping[str, Any]]]) -> tuple[Block, ...] | None:
    if "encoder.conv_in.conv.bias" not in shapes or "encoder.conv_out.conv.bias" not in shapes:
        return None
    width, blocks, count = length(shapes, "encoder.conv_in.conv.bias"), [], rows(shapes, "encoder.down_blocks")
    for i in range(count):
        place = f"encoder.down_blocks.{i}"
        said = said_of(listed, i, place)
        if (found := _layers(shapes, place)) is not None:
            width = found[0]
            blocks.append(Block(*found))
        elif f"{place}.conv1.conv.bias" in shapes:
            width = length(shapes, f"{place}.conv1.conv.bias")
            blocks.append(Block(width))
        elif f"{place}.conv.conv.bias" in shapes:
            made = length(shapes, f"{place}.conv.conv.bias")
            later = [f for j in range(i + 1, count) if (f := _layers(shapes, f"encoder.down_blocks.{j}")) is not None]
            kind = said[0].removeprefix("compress_").removesuffix("_res") if said else (
                _named(later[0][0] / made, place) if later else "all"
            )  # fmt: skip
            stride = _stride(kind, place)
            width = made * math.prod(stride)
            blocks.append(Block(width, stride=stride, shortcut=True))
        elif f"{place}.conv.bias" in shapes:
            width = length(shapes, f"{place}.conv.bias")
            kind = said[0].removeprefix("compress_").removesuffix("_x_y") if said else "all"
            blocks.append(Block(width, stride=_stride(kind, place)))
        else:
            raise InputError(f"{place} is no block that is known")
    return tuple(blocks)


def decoder(config: Config) -> Program:
    width, timed = config.decoder_enters, config.timestep is not None
    items: list[Step | Mark] = [
        Denormalise(STATISTICS, config.latent_channels), Conv("conv_in.conv", config.latent_channels, width)
    ]  # fmt: skip
    tiles = False
    for i, block in enumerate(config.decoder_blocks):
        place = f"up_blocks.{i}"
        if block.stride is not None:
            # After it there are more frames of a larger size; its own convolutions work at the smaller size.
            items += [] if tiles else [TILES]
            tiles = True
            items.append(DepthUp(place, width, block.width, block.stride, block.shortcut))
            items += [STEP] if block.stride[1] > 1 else []
        elif block.layers:
            for j in range(block.layers):
                name = f"{place}.res_blocks.{j}"
                items.append(_res(name, width, width, timed, block.noisy, config.timestep, place, j == 0))
        else:
            items.append(_res(place, width, block.width, False, block.noisy, None, place, False))
        width = block.width
    if not tiles:
        raise InputError("its decoder's resolution does not change")
    if timed:
        end: Step = conditioned.Pixels(
            "conv_norm_out", "conv_out.conv", width, NORM, config.patch, timestep=config.timestep
        )
    else:
        end = Pixels("conv_norm_out", "conv_out.conv", width, NORM, config.patch)
    border, after = config.decoder_border, int(not config.causal)
    return Program.of("decoder", config.latent_channels, *items, end, border=border, after=after, single=True)


def _res(
    name: str, c_in: int, c_out: int, timed: bool, noisy: bool, timestep: float | None, place: str, owns: bool
) -> Step:
    if not timed and not noisy and c_in == c_out:
        return Res(name, c_in, c_out, NORM, NAMES)
    embedding = f"{place}.time_embedder" if timed else ""
    return conditioned.Res(name, c_in, c_out, NORM, NAMES, embedding, timed and owns, timestep or 0.0, noisy)


def encoder(config: Config) -> Program:
    width, latent, patch = config.encoder_enters, config.latent_channels, config.patch
    blocks, steps = config.encoder_blocks, [Patches("patches", patch * _factor(config.encoder_blocks), patch)]
    items: list[Step | Mark] = [*steps, Conv("conv_in.conv", 3 * patch**2, width)]
    last = max((i for i, b in enumerate(blocks) if b.stride is not None), default=-1)
    if last < 0:
        raise InputError("its encoder's resolution does not change")
    stepped = False
    for i, block in enumerate(blocks):
        place = f"down_blocks.{i}"
        if block.stride is not None:
            if not stepped and block.stride[0] > 1:
                items.append(STEP)
                stepped = True
            if block.shortcut:
                items.append(DepthDown(place, width, block.width, block.stride))
            else:
                items.append(StrideDown(f"{place}.conv", width, block.width, block.stride))
            if i == last:
                items.append(TILES)
        elif block.layers:
            names = (f"{place}.res_blocks.{j}" for j in range(block.layers))
            items += [_res(name, width, width, False, False, None, place, False) for name in names]
        else:
            items.append(_res(place, width, block.width, False, False, None, place, False))
        width = block.width
    if not stepped:
        raise InputError("its encoder does not change the frame rate")
    made = latent + 1 if config.shared else 2 * latent
    return Program.of(
        "encoder", 3, *items, Moments("conv_norm_out", "conv_out.conv", width, made, NORM),
        Normalise(STATISTICS, latent, config.shared), border=config.encoder_border, single=True,
        direct=DIRECT,
    )  # fmt: skip


def _factor(blocks: tuple[Block, ...]) -> int:
    """Return the factor that divides rows."""
    return math.prod(b.stride[1] for b in blocks if b.stride is not None)


#: LTX-2.3's and LTX-2.5's decoder, from the latent on: width, residual blocks, and the resampling before them.
_LEVELS = ((1024, 2, None), (512, 2, "all"), (512, 4, "all"), (256, 6, "time"), (128, 4, "space"))


def _published() -> Config:
    blocks: list[Block] = []
    for width, layers, kind in _LEVELS:
        blocks += [Block(width, stride=STRIDES[kind])] if kind else []
        blocks.append(Block(width, layers))
    return Config(None, tuple(blocks), 0, 1024, decoder_border="zero")


def _metadata() -> str:
    """Return the "config" metadata of a file of these sizes. The encoder in it is a dummy: ComfyUI builds no VAE
    without one."""
    listed: list[list[Any]] = []
    before = 0
    for width, layers, kind in _LEVELS:
        listed += [[f"compress_{kind}", {"multiplier": before // width}]] if kind else []
        listed.append(["res_x", {"num_layers": layers}])
        before = width
    block = ["res_x", {"num_layers": 1}]
    vae = {
        "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "patch_size": 4,
        "latent_channels": 128, "latent_log_var": "uniform", "norm_layer": "pixel_norm", "causal_decoder": False,
        "timestep_conditioning": False, "spatial_padding_mode": "zeros", "decoder_base_channels": 128,
        "encoder_base_channels": 16, "decoder_blocks": listed[::-1],
        "encoder_blocks": [block, ["compress_all", {}], block],
    }  # fmt: skip
    return json.dumps({"vae": vae})


#: Diffusers' names, of LTX-2 too.
DIFFUSERS = KeySet(
    "ltx-diffusers",
    tuple((f"{row}.0.resnets.0.conv1.conv.weight", "latents_mean", "latents_std")
          for row in ("decoder.up_blocks", "encoder.down_blocks")),
    ltx_names.native,
)  # fmt: skip
ARCHITECTURE = Architecture(
    KeySet(
        "ltx",
        tuple(
            tuple(f"{half}_blocks.0.res_blocks.0.{conv}.conv.weight" for conv in ("conv1", "conv2"))
            for half in ("decoder.up", "encoder.down")
        ),
    ),
    PIXELS, FRAMES, 1.0, Config.from_shapes, encoder, decoder, native="bf16",
    published=Published(
        # LTX-2.5 comes with a diffusion decoder, which is another network, or with this one ("conv").
        "LTX-2.3", _published(), r"ltx(?![a-z _.-]*2[._]?5(?!.*conv))", ("ltx", "ltxv", "ltx-video"),
        (("config", _metadata()),),
    ),
    # The largest convolutions work at a quarter of the full size.
    step_pixels=16 << 20, described=Config.described, unused=UNUSED,
)  # fmt: skip
