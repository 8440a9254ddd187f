"""The VAEs of Wan 2.1 (which is Qwen-Image's too) and Wan 2.2: 4x causal temporal compression; 8x8 pixels into 16
channels, or 16x16 into 48, the last 2x2 of them by moving pixels into channels."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from ..layers import CausalConv3d, FrameAttention, FrameConv, LengthNormAct, Resnet, name_halos
from ..runtime.state import State
from .arch import Architecture, Network

#: By level from full to lowest resolution: does the step to the next one halve the frame rate too?
TEMPORAL = (False, True, True)
Widths = tuple[int, int, int, int]
Shapes = Mapping[str, tuple[int, ...]]
_Conv = functools.partial(CausalConv3d, head="zero")


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution, e.g. (96, 192, 384, 384). None: that half is absent from the file.

    patch: pixels per side that become channels. 2 is Wan 2.2, whose levels are also nested, have shortcuts around
    them, and keep their width while they upsample; Wan 2.1 halves it.
    """

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 16
    patch: int = 1
    #: Lengths are taken over all channels.
    norm_groups: None = None

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None, patch: int = 1) -> Config:
        """Read the widths from biases (they survive every file dialect). `norm_groups` has no meaning here."""

        def widths(half: str, row: str, resnets: int) -> Widths | None:
            """Of each level's first resnet, in the file's order."""
            first = [f"{i}.{row}.0" if patch == 2 else str(i * (resnets + 1)) for i in range(4)]
            names = [f"{half}.{row}.{i}.residual.2.bias" for i in first]
            if not all(n in shapes for n in names):
                return None
            a, b, c, d = (shapes[n][0] for n in names)
            return a, b, c, d

        encoder, decoder = widths("encoder", "downsamples", 2), widths("decoder", "upsamples", 3)
        if decoder is not None:
            decoder = (decoder[3], decoder[2], decoder[1], decoder[0])
            if patch == 2 and any(low % high for high, low in itertools.pairwise(decoder)):
                raise InputError(f"decoder widths {decoder} do not divide each other, as its shortcuts need")
        colours = {"decoder.head.2.bias": shapes.get("decoder.head.2.bias", (3 * patch**2,))[0] // patch**2}
        if encoder and "encoder.conv1.weight" in shapes:
            count = math.prod(shapes["encoder.conv1.weight"])
            colours["encoder.conv1.weight"] = count // (27 * encoder[0] * patch**2)
        for name, number in colours.items():
            if number != 3:
                raise InputError(f"{name} is for {number} colour channels; only RGB networks are run")
        latent = 48 if patch == 2 else 16
        if "conv2.bias" in shapes:
            latent = shapes["conv2.bias"][0]
        elif "conv1.bias" in shapes:
            latent = shapes["conv1.bias"][0] // 2
        return cls(encoder, decoder, latent, patch)

    @property
    def stream_widths(self) -> set[int]:
        """Of every residual stream."""
        decoder = self.decoder_widths or ()
        return {*(self.encoder_widths or ()), *decoder, *(_upsampled(w, self.patch) for w in decoder[1:])}


def _upsampled(width: int, patch: int) -> int:
    """Channels behind a level's upsampler."""
    return width if patch == 2 else width // 2


class WanResnet(Resnet):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        # The published numbering also counts activations and a dropout.
        self.residual = nn.ModuleDict(
            {
                "0": LengthNormAct(c_in),
                "2": _Conv(c_in, c_out),
                "3": LengthNormAct(c_out),
                "6": _Conv(c_out, c_out),
            }
        )
        self.shortcut = _Conv(c_in, c_out, (1, 1, 1)) if c_in != c_out else None

    norm1 = property(lambda self: self.residual["0"])
    conv1 = property(lambda self: self.residual["2"])
    norm2 = property(lambda self: self.residual["3"])
    conv2 = property(lambda self: self.residual["6"])
    conv_shortcut = property(lambda self: self.shortcut)


class WanAttention(FrameAttention):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = LengthNormAct(channels, act=False, axes=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        weights, biases = self.to_qkv.weight.flatten(1).chunk(3), self.to_qkv.bias.chunk(3)
        return [*zip(weights, biases, strict=True), (self.proj.weight.flatten(1), self.proj.bias)]


class Upsample(nn.Module):
    """Frames doubled by `time_conv` where temporal, then pixels doubled and a 3x3 convolution of every frame.

    A clip's first frame passes by the time_conv, which sees zeros in its place: T frames become 2T - 1 in the first
    call, 2T in later ones. Its first C output channels are the earlier frame of each pair.
    """

    def __init__(self, c_in: int, c_out: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": FrameConv(c_in, c_out, 3, padding=1)})
        self.time_conv = _Conv(c_in, 2 * c_in, (3, 1, 1)) if temporal else None

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if self.time_conv is not None:
            x = self._double_frames(x, state)
        return self.resample["1"](F.interpolate(x, scale_factor=(1, 2, 2)))

    def _double_frames(self, x: Tensor, state: State | None) -> Tensor:
        lead = x[:, :, : int(self.time_conv.starts(state))]
        x = x[:, :, lead.shape[2] :]
        if x.shape[2] == 0:
            if state is not None:
                state.keep(self.time_conv.key, torch.zeros_like(lead).repeat(1, 1, 2, 1, 1))
            return lead
        pairs = self.time_conv(x, state).unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        return torch.cat((lead, pairs), 2) if lead.shape[2] else pairs


class Downsample(nn.Module):
    """Zero row below and column to the right, then a strided 3x3 convolution of every frame; where temporal, a
    time_conv makes one frame of the two new ones and the one before. A clip's first frame passes by the time_conv."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": FrameConv(channels, channels, 3, stride=2)})
        self.time_conv = CausalConv3d(channels, channels, (3, 1, 1), (2, 1, 1), head="none") if temporal else None

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        x = self.resample["1"](F.pad(x, (0, 1, 0, 1)))
        if self.time_conv is None:
            return x
        if not self.time_conv.starts(state):
            return self.time_conv(x, state)
        lead = x[:, :, :1].clone()
        if x.shape[2] == 1:
            if state is not None:
                state.keep(self.time_conv.key, lead)
            return lead
        return torch.cat((lead, self.time_conv(x, state)), 2)


def duplicate_up(x: Tensor, channels: int, temporal: bool, starts: bool) -> Tensor:
    """Wan 2.2's shortcut around an upsampling level: every value repeated into `channels` and its 2x2 (x2) samples."""
    b, c, t, h, w = x.shape
    z = 2 if temporal else 1
    x = x.repeat_interleave(channels * 4 * z // c, 1).view(b, channels, z, 2, 2, t, h, w)
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, channels, t * z, 2 * h, 2 * w)
    return x[:, :, 1:] if starts and temporal else x


def average_down(x: Tensor, channels: int, temporal: bool, down: bool) -> Tensor:
    """The shortcut around a downsampling level: means over the samples and neighbouring channels that become one.

    A clip's first frame has a zero frame for its partner.
    """
    z, s = (2 if temporal else 1), (2 if down else 1)
    x = F.pad(x, (0, 0, 0, 0, x.shape[2] % z, 0))
    b, c, t, h, w = x.shape
    x = x.view(b, c, t // z, z, h // s, s, w // s, s).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(b, channels, c * z * s * s // channels, t // z, h // s, w // s).mean(2)


class Level(nn.Module):
    """Resnets of one resolution and the step to the next."""

    def __init__(self, resnets: list[WanResnet], step: Upsample | Downsample | None, nested: str) -> None:
        """nested: Wan 2.2's name of the list of these layers; "" where one list holds all levels' layers."""
        super().__init__()
        layers = [*resnets, *([step] if step is not None else [])]
        # Tuples are not registered: the parameters belong to this list, or to the half's.
        self.layers, self.resnets, self._step = tuple(layers), tuple(resnets), (step,)
        self.shortcut = bool(nested)
        if nested:
            self.add_module(nested, nn.ModuleList(layers))

    @property
    def step(self) -> Upsample | Downsample | None:
        return self._step[0]

    @property
    def temporal(self) -> bool:
        return self.step is not None and self.step.time_conv is not None

    @property
    def width(self) -> int:
        return self.resnets[-1].conv2.out_channels

    def run(self, x: Tensor, state: State | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, state)
        return x


class UpLevel(Level):
    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        starts = self.temporal and self.step.time_conv.starts(state)
        y = self.run(x, state)
        return y + duplicate_up(x, self.width, self.temporal, starts) if self.shortcut and self.step else y


class DownLevel(Level):
    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        y = self.run(x, state)
        return y + average_down(x, self.width, self.temporal, self.step is not None) if self.shortcut else y


def _register(levels: tuple[Level, ...]) -> nn.ModuleList:
    """The list that a half's levels have in the file."""
    return nn.ModuleList(levels if levels[0].shortcut else [layer for level in levels for layer in level.layers])


class Middle(nn.ModuleList):
    """Resnet, attention, resnet at the lowest resolution."""

    def __init__(self, width: int) -> None:
        super().__init__([WanResnet(width, width), WanAttention(width), WanResnet(width, width)])

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        return self[2](self[1](self[0](x, state)), state)


def _head(c_in: int, c_out: int) -> nn.ModuleDict:
    return nn.ModuleDict({"0": LengthNormAct(c_in), "2": _Conv(c_in, c_out)})


class Encoder(nn.Module):
    """[B, 3, F, H, W] in -1..1 -> moments [B, 2 * latent, T, h, w], T = (F - 1) // 4 + 1; parts as in arch.Encoder.

    Rows and columns that fill no latent pixel are cut off by Wan 2.2, whose patches and shortcuts need whole blocks.
    """

    def __init__(self, config: Config, at_latent: CausalConv3d) -> None:
        super().__init__()
        w, self.patch = config.encoder_widths, config.patch
        self.conv1 = _Conv(3 * self.patch**2, w[0])
        self.levels = tuple(
            DownLevel(
                [WanResnet(w[max(i - 1, 0)], w[i]), WanResnet(w[i], w[i])],
                Downsample(w[i], TEMPORAL[i]) if i < 3 else None,
                "downsamples" if self.patch == 2 else "",
            )
            for i in range(4)
        )
        self.downsamples = _register(self.levels)
        self.middle = Middle(w[3])
        self.head = _head(w[3], 2 * config.latent_channels)
        self.at_latent = (at_latent,)  # registered beside this half

    def high(self, x: Tensor, state: State | None = None) -> Tensor:
        if self.patch == 2:
            h, w = (n // 16 * 16 for n in x.shape[3:])
            x = patches(x[..., :h, :w])
        return self.levels[0](self.conv1(x, state), state)

    def mid(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.levels[2](self.levels[1](x, state), state)

    def low(self, x: Tensor, state: State | None = None) -> Tensor:
        x = self.middle(self.levels[3](x, state), state)
        return self.at_latent[0](self.head["2"](self.head["0"](x), state))

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if state is None:
            x = x[:, :, : (x.shape[2] - 1) // 4 * 4 + 1]
        return self.low(self.mid(self.high(x, state), state), state)


class Decoder(nn.Module):
    """[B, latent, T, h, w] (the network's own) -> [B, 3, 4(T - 1) + 1, H, W], about -1..1, not clamped; parts as in
    arch.Decoder."""

    def __init__(self, config: Config, at_latent: CausalConv3d) -> None:
        super().__init__()
        w, self.patch = config.decoder_widths[::-1], config.patch
        self.conv1 = _Conv(config.latent_channels, w[0])
        self.middle = Middle(w[0])
        after = [_upsampled(n, self.patch) for n in w]
        entering = [w[0], *after[:3]]
        self.levels = tuple(
            UpLevel(
                [WanResnet(a, w[i]) for a in (entering[i], w[i], w[i])],
                Upsample(w[i], after[i], TEMPORAL[2 - i]) if i < 3 else None,
                "upsamples" if self.patch == 2 else "",
            )
            for i in range(4)
        )
        self.upsamples = _register(self.levels)
        self.head = _head(w[3], 3 * self.patch**2)
        self.at_latent = (at_latent,)  # registered beside this half

    def low(self, z: Tensor, state: State | None = None) -> Tensor:
        return self.middle(self.conv1(self.at_latent[0](z), state), state)

    def mid(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.levels[1](self.levels[0](x, state), state)

    def high(self, x: Tensor, state: State | None = None) -> Tensor:
        x = self.levels[3](self.levels[2](x, state), state)
        x = self.head["2"](self.head["0"](x), state)
        return pixels(x) if self.patch == 2 else x

    def forward(self, z: Tensor, state: State | None = None) -> Tensor:
        return self.high(self.mid(self.low(z, state), state), state)


def patches(x: Tensor) -> Tensor:
    """[B, C, T, H, W] -> [B, 4C, T, H / 2, W / 2], channel (c * 2 + column) * 2 + row."""
    b, c, t, h, w = x.shape
    return x.reshape(b, c, t, h // 2, 2, w // 2, 2).permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def pixels(x: Tensor) -> Tensor:
    """What `patches` undoes."""
    b, c, t, h, w = x.shape
    return x.view(b, c // 4, 2, 2, t, h, w).permute(0, 1, 4, 5, 3, 6, 2).reshape(b, c // 4, t, 2 * h, 2 * w)


class Wan(Network):
    """Both halves; the 1x1x1 convolutions at the latent lie beside them in the file: conv1 ends the encoder, conv2
    begins the decoder."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        c = config.latent_channels
        self.conv1 = _Conv(2 * c, 2 * c, (1, 1, 1)) if config.encoder_widths else None
        self.conv2 = _Conv(c, c, (1, 1, 1)) if config.decoder_widths else None
        self.encoder = Encoder(config, self.conv1) if config.encoder_widths else None
        self.decoder = Decoder(config, self.conv2) if config.decoder_widths else None
        name_halos(self)


def _architecture(name: str, spatial: int, patch: int) -> Architecture:
    return Architecture(
        name=name,
        spatial=spatial,
        temporal=4,
        scale=1.0,  # mean and deviation of the latents are the sampler's matter
        configure=functools.partial(Config.from_shapes, patch=patch),
        build=Wan,
        decoder_parts=("decoder", "conv2"),
        encoder_parts=("encoder", "conv1"),
        native="bf16",
    )


WAN21 = _architecture("wan2.1", 8, 1)
WAN22 = _architecture("wan2.2", 16, 2)
